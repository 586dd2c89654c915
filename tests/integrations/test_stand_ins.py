"""What Hugging Face's libraries write into the JSON otherwise than it is meant."""

from __future__ import annotations

import pytest

from launcher.errors import ConfigError
from launcher.integrations.stand_ins import _as_meant


def test_a_path_in_one_key_is_a_section(caplog: pytest.LogCaptureFixture) -> None:
    """TRL writes sizes so, and not as whole numbers."""
    given = {"zero_optimization": {"stage": 3}, "zero_optimization.reduce_bucket_size": 1024.0}
    assert _as_meant(given, 1) == {"zero_optimization": {"stage": 3, "reduce_bucket_size": 1024}}


@pytest.mark.parametrize(("world", "kept"), [(2, True), (4, False)])
def test_ranks_that_share_a_sequence_are_counted_once(world: int, kept: bool) -> None:
    """16 = 2 x 2 x 4 counts every rank of four; of two ranks it would be wrong, which the batch equation says."""
    given = {
        "tensor_parallel": {"autotp_size": 2},
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
    }
    assert ("train_batch_size" in _as_meant(given, world)) == kept


def test_pipeline_stages_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"pipeline\.stages is 2"):
        _as_meant({"pipeline": {"stages": 2}}, 2)
