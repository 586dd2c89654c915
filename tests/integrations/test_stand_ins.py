"""JSON values that Hugging Face's libraries write in an unexpected form."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from launcher.errors import ConfigError
from launcher.integrations.stand_ins import Init, _as_meant, initialize, tp_model_init
from tests.engine.driving import config_of
from tests.pool import RankContext, WorkerPool
from tests.pool.reference import tiny_llama
from tests.zero.models import stack


def test_a_path_in_one_key_is_a_section(caplog: pytest.LogCaptureFixture) -> None:
    """TRL writes sizes this way, and not as integers."""
    given = {"zero_optimization": {"stage": 3}, "zero_optimization.reduce_bucket_size": 1024.0}
    assert _as_meant(given, 1) == {"zero_optimization": {"stage": 3, "reduce_bucket_size": 1024}}


@pytest.mark.parametrize(("world", "kept"), [(2, True), (4, False)])
def test_ranks_that_share_a_sequence_are_counted_once(world: int, kept: bool) -> None:
    """16 = 2 x 2 x 4 counts every rank of four; for two ranks it would be wrong, which the batch equation reports."""
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


def split_by_call(ctx: RankContext, given: dict[str, Any] | None) -> int:
    model = tp_model_init(tiny_llama(), tp_size=2, dtype=torch.float32)
    more = {} if given is None else {"tensor_parallel": given}
    engine = initialize(model=model, config=config_of(1, **more))[0]
    degree = engine.mesh.axes["tp"].degree
    engine.destroy()
    return degree


def refused_by_call(ctx: RankContext) -> None:
    with pytest.raises(ConfigError, match="called with tp_size=2, but the JSON sets 1"):
        split_by_call(ctx, {"autotp_size": 1})


def test_a_model_is_split_as_the_call_says(pool: WorkerPool) -> None:
    assert pool.run(split_by_call, 2, None) == pool.run(split_by_call, 2, {"autotp_size": 2}) == [2, 2]
    pool.run(refused_by_call, 2)


@pytest.mark.parametrize(("degree", "kept"), [(2, False), (4, True)])
def test_the_data_parallel_degree_that_follows_is_left_out(degree: int, kept: bool) -> None:
    """Any other degree is refused as an unimplemented key."""
    given = {"tensor_parallel": {"autotp_size": 2}, "data_parallel_size": degree}
    assert ("data_parallel_size" in _as_meant(given, 4)) is kept


def dtypes_inside_init(ctx: RankContext, sections: dict[str, Any]) -> set[torch.dtype]:
    with Init(config_dict_or_path={"train_batch_size": "auto", **sections}):
        model = stack()
    return {parameter.dtype for parameter in model.parameters()}


def test_the_json_says_in_which_dtype_a_model_is_built(pool: WorkerPool) -> None:
    """`auto` does not determine it yet."""
    cases = [("bf16", True, torch.bfloat16), ("fp16", True, torch.half), ("bf16", "auto", torch.float32)]
    for section, enabled, dtype in cases:
        assert pool.run(dtypes_inside_init, 1, {section: {"enabled": enabled}}) == [{dtype}]


def marks(ctx: RankContext) -> list[list[int]]:
    """Return, for every parameter, its elements, its elements on this rank, and the number of wrong attributes."""
    config = config_of(3, zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 10})
    engine = initialize(model=stack(), config=config)[0]
    found = []
    for parameter in engine.module.parameters():
        wrong = [parameter.ds_shape != parameter.shape, parameter.ds_numel != parameter.numel()]
        found.append([parameter.ds_numel, parameter.partition_numel(), sum(wrong)])
    assert len({parameter.ds_id for parameter in engine.module.parameters()}) == len(found)
    engine.destroy()
    return found


def test_parameters_of_stage_3_are_marked(pool: WorkerPool) -> None:
    """Covers sharded and small parameters; libraries that count parameters read only these attributes."""
    for found in pool.run(marks, 2):
        assert {numel <= 10 for numel, _, _ in found} == {True, False}
        for numel, here, wrong in found:
            assert (here, wrong) == (numel if numel <= 10 else numel // 2, 0)
    assert not hasattr(torch.nn.Parameter(torch.ones(2)), "ds_id")
