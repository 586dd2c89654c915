"""A sample of the causal-LM types behaves as docs/models.md says with sharded sequences; `make models` tests all."""

from __future__ import annotations

import pytest

from tests.pool import WorkerPool
from tests.sequence.zoo import WORKS, judge
from tests.tensor.models_table import shared_verdicts


def test_none_is_wrong() -> None:
    """Every type works, or is refused with a reason."""
    assert len(shared_verdicts()) > 180
    assert all(word == WORKS or word.startswith("refused: ") for word in shared_verdicts().values())


@pytest.mark.parametrize("kind", ["gpt2", "roc_bert", "camembert", "mamba"])
def test_a_sample_is_as_the_table_says(pool: WorkerPool, kind: str) -> None:
    assert pool.run(judge, 2, kind) == [shared_verdicts()[kind]] * 2
