"""Loaders of a dataset that give each data-parallel rank its share: one rule for `initialize(training_data=...)`,
`engine.deepspeed_io()` and DeepSpeed's loader class. The order of rows is DeepSpeed's."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset


def share_of(
    dataset: Any, ranks: int, rank: int, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
) -> DistributedSampler[Any] | None:
    """Return the rows of one rank; None for a dataset that is iterated: it deals itself out.

    Args:
        ranks, rank: data-parallel ranks, and which of them.
        shuffle: in an order of its own each epoch, by the seed; false: as the rows lie.
        drop_last: leave out rows that the ranks cannot share evenly; else some come twice.
    """
    if isinstance(dataset, IterableDataset):
        return None
    return DistributedSampler(dataset, ranks, rank, shuffle=shuffle, seed=seed, drop_last=drop_last)


def loader_of(
    dataset: Any,
    batch_size: int | None,
    sampler: Any,
    *,
    collate_fn: Any = None,
    num_workers: int | None = None,
    pin_memory: bool = False,
    drop_last: bool = False,
) -> DataLoader[Any]:
    """Return batches of the rows that a sampler names.

    Args:
        batch_size: of one rank.
        num_workers: processes that load rows; None: none.
        drop_last: leave out a short last batch.
    """
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        collate_fn=collate_fn,
        num_workers=num_workers or 0,
        pin_memory=pin_memory,
        drop_last=drop_last,
    )
