"""Dataloaders that shard a dataset over data-parallel ranks, shared by `initialize(training_data=...)`,
`engine.deepspeed_io()` and DeepSpeed's loader class. The order of rows matches DeepSpeed."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset


def share_of(
    dataset: Any, ranks: int, rank: int, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
) -> DistributedSampler[Any] | None:
    """Return the sampler of one rank, or None for an iterable dataset, which must shard itself.

    Args:
        ranks, rank: number of data-parallel ranks, and the index of this rank.
        shuffle: reshuffle every epoch, by the seed; False keeps the order of the dataset.
        drop_last: drop rows that do not divide evenly among the ranks; otherwise some rows are repeated.
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
    """Return a dataloader of the rows that a sampler selects.

    Args:
        batch_size: batch size per rank.
        num_workers: number of worker processes; None is 0.
        drop_last: drop an incomplete last batch.
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
