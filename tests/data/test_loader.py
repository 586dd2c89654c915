"""The global batch is the same on every topology, is split over ranks, and can be resumed anywhere."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from launcher.data.loader import Batch, GlobalBatchLoader
from launcher.errors import ConfigError


class Numbered:
    """Item i is [i, i, i]."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), index)


class Conversations(Numbered):
    def __getitem__(self, index: int) -> Batch:  # type: ignore[override]
        return {"input_ids": torch.full((3,), index), "labels": torch.full((3,), -index)}


def loader(dp_rank: int = 0, dp_degree: int = 1, **changes: Any) -> GlobalBatchLoader:
    options: dict[str, Any] = {"global_batch": 8, "micro_batch": 2, "seed": 7, **changes}
    dataset = options.pop("dataset", None) or Numbered(options.pop("count", 100))
    return GlobalBatchLoader(dataset, dp_rank=dp_rank, dp_degree=dp_degree, **options)


def ids(batches: list[Batch]) -> list[int]:
    return [int(row[0]) for batch in batches for row in batch["input_ids"]]


def global_batches(
    dp_degree: int, steps: int, state: dict[str, int] | None = None, **changes: Any
) -> list[list[int]]:
    """Return the sequences of all ranks, in rank order, for each step."""
    ranks = [loader(rank, dp_degree, **changes) for rank in range(dp_degree)]
    for rank in ranks:
        if state is not None:
            rank.load_state_dict(state)
    iterators = [rank.steps() for rank in ranks]
    return [[i for iterator in iterators for i in ids(next(iterator))] for _ in range(steps)]


@given(st.integers(0, 2**32), st.integers(8, 40), st.booleans(), st.booleans())
def test_the_global_batch_of_a_step_is_the_same_on_every_topology(
    seed: int, count: int, shuffle: bool, drop_last: bool
) -> None:
    options = {"seed": seed, "count": count, "shuffle": shuffle, "drop_last": drop_last}
    reference = global_batches(1, 12, **options)
    assert global_batches(2, 12, **options) == reference
    assert global_batches(4, 12, **options) == reference
    assert global_batches(2, 12, **{**options, "micro_batch": 1}) == reference


def test_microbatches_have_their_shape_and_labels() -> None:
    batches = next(loader(1, 2).steps())
    assert len(batches) == 2 == loader(1, 2).microbatches_per_step
    for batch in batches:
        assert batch["input_ids"].shape == (2, 3) and batch["input_ids"].dtype == torch.int64
        assert batch["labels"].equal(batch["input_ids"])


def test_items_that_are_dicts_are_stacked_by_name() -> None:
    batch = next(iter(loader(dataset=Conversations(50))))
    assert batch["input_ids"].shape == (2, 3)
    assert batch["labels"].equal(-batch["input_ids"])


def test_an_epoch_has_every_sequence_once_and_the_next_another_order() -> None:
    data = loader(count=24)
    first, second = ids(list(data)), ids(list(data))
    assert sorted(first) == sorted(second) == list(range(24))
    assert first != second
    assert first != ids(list(loader(count=24, seed=8)))
    assert data.epoch == 2
    assert len(data) == 12


def test_without_shuffle_the_order_is_the_datasets() -> None:
    data = loader(count=16, shuffle=False)
    assert ids(list(data)) == ids(list(data)) == list(range(16))


def test_the_rest_is_dropped_or_filled_from_the_same_epoch() -> None:
    assert loader(count=21).steps_per_epoch == 2
    assert len(ids(list(loader(count=21)))) == 16
    kept = loader(count=21, drop_last=False)
    seen = ids(list(kept))
    assert kept.steps_per_epoch == 3 and len(seen) == 24
    assert sorted(seen[:21]) == list(range(21)) and seen[21:] == seen[:3]
    assert kept.state_dict() == {"epoch": 1, "samples": 0}


@pytest.mark.parametrize("dp_degree, micro_batch", [(1, 1), (2, 2), (4, 2), (8, 1)])
def test_resume_in_the_middle_of_an_epoch_on_another_topology(dp_degree: int, micro_batch: int) -> None:
    reference = global_batches(2, 30, count=100)
    saved = loader(0, 2)
    list(islice(saved.steps(), 17))  # 12 steps an epoch: 5 steps into the second
    state = saved.state_dict()
    assert state == {"epoch": 1, "samples": 40}
    assert global_batches(dp_degree, 13, state, micro_batch=micro_batch) == reference[17:]


def test_resume_with_another_global_batch_uses_every_sequence_once() -> None:
    before = loader(count=40)
    used = [i for step in islice(before.steps(), 2) for i in ids(step)]
    after = loader(count=40, global_batch=12)
    after.load_state_dict(before.state_dict())
    assert sorted(used + ids(list(after))) == list(range(40))

    late = loader(count=40)
    late.load_state_dict({"epoch": 0, "samples": 36})  # too little is left for a global batch of 8
    assert late.state_dict() == {"epoch": 1, "samples": 0}


def test_a_state_saved_after_the_last_microbatch_of_a_step_continues_with_the_next() -> None:
    reference = ids(list(loader(count=32)))
    data = loader(count=32)
    seen = [ids([batch]) for batch in islice(iter(data), 4)]
    resumed = loader(count=32)
    resumed.load_state_dict(data.state_dict())
    assert [i for batch in seen for i in batch] + ids(list(resumed)) == reference

    halfway = loader(count=32)
    list(islice(iter(halfway), 5))  # one microbatch into the second step: that step begins again
    assert halfway.state_dict() == {"epoch": 0, "samples": 8}


def test_a_state_saved_at_the_end_of_an_epoch_begins_the_next() -> None:
    data = loader(count=16)
    list(islice(data.steps(), 2))
    assert data.state_dict() == {"epoch": 1, "samples": 0}


def test_set_epoch_keeps_the_place_in_that_very_epoch() -> None:
    data = loader(count=32)
    data.load_state_dict({"epoch": 1, "samples": 8})
    data.set_epoch(1)
    assert data.state_dict() == {"epoch": 1, "samples": 8}
    data.set_epoch(0)
    assert ids(list(data)) == ids(list(loader(count=32)))


def test_numbers_that_do_not_fit_are_named() -> None:
    with pytest.raises(ConfigError, match="7 sequences, fewer than one global batch of 8"):
        loader(count=7)
    with pytest.raises(ConfigError, match="global batch of 8 cannot be divided among 3"):
        loader(0, 3)
    with pytest.raises(ConfigError, match="rank 2 is out of range: there are 2 ranks"):
        loader(2, 2)
