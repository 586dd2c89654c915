"""`deepspeed.runtime.dataloader.DeepSpeedDataLoader`: shards a dataset over the data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch.utils.data import IterableDataset, RandomSampler

from launcher.engine.loaders import loader_of, share_of


class DeepSpeedDataLoader:
    """Loads batches of this data-parallel rank's shard of a dataset.

    Args:
        batch_size: batch size per rank.
        data_sampler: default: this rank's shard, in random order.
        tput_timer: timer that is started at each batch, or None.
        local_rank: below 0 for a single process, which reads rows in torch's random order.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        pin_memory: bool,
        local_rank: int,
        tput_timer: Any,
        collate_fn: Callable[..., Any] | None = None,
        num_local_io_workers: int | None = None,
        data_sampler: Any = None,
        data_parallel_world_size: int | None = None,
        data_parallel_rank: int | None = None,
        dataloader_drop_last: bool = False,
        deepspeed_dataloader_config: Mapping[str, Any] | None = None,
    ) -> None:
        self.dataset, self.batch_size, self.tput_timer = dataset, batch_size, tput_timer
        self.data_sampler = data_sampler or _share(
            dataset, local_rank, data_parallel_world_size, data_parallel_rank
        )
        self.dataloader = loader_of(
            dataset,
            batch_size,
            self.data_sampler,
            collate_fn=collate_fn,
            num_workers=num_local_io_workers,
            pin_memory=pin_memory,
            drop_last=dataloader_drop_last,
        )
        self.data: Iterator[Any] | None = None
        self.post_process_func: Callable[[Any, Any], Any] | None = None

    def __len__(self) -> int:
        return len(self.dataloader)

    def __iter__(self) -> DeepSpeedDataLoader:
        self.data = iter(self.dataloader)
        return self

    def __next__(self) -> Any:
        if self.tput_timer is not None:
            self.tput_timer.start()
        if self.data is None:
            self.data = iter(self.dataloader)
        batch = next(self.data)
        return self.post_process_func(batch, self.data_sampler) if self.post_process_func else batch


def _share(dataset: Any, local_rank: int, ranks: int | None, rank: int | None) -> Any:
    if local_rank < 0 and not isinstance(dataset, IterableDataset):
        return RandomSampler(dataset)
    there = dist.is_initialized()
    ranks = ranks if ranks is not None else (dist.get_world_size() if there else 1)
    rank = rank if rank is not None else (dist.get_rank() if there else 0)
    return share_of(dataset, ranks, rank)
