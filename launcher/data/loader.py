"""The global batch of a step, and one rank's share of it.

global batch: `global_batch` sequences, the same in the same order on every topology.
share: the contiguous `global_batch / dp_degree` sequences of one data-parallel rank.
microbatch: `micro_batch` sequences of a share; a step has `global_batch / (micro_batch * dp_degree)` of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch

from launcher.errors import ConfigError

Batch = dict[str, torch.Tensor]


class Sequences(Protocol):
    """A map-style dataset: items are LongTensors [seq_length], or dicts of tensors that stack."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> torch.Tensor | Batch: ...


class GlobalBatchLoader:
    """Distributes the global batches of `dataset` to data-parallel ranks.

    The order of an epoch is a permutation that depends only on (seed, epoch), so neither the global batch of
    a step nor the state depends on the topology.

    Args:
        dataset: items are LongTensors [seq_length] (labels are the tokens then) or dicts of tensors.
        global_batch: sequences per optimizer step over all ranks (`train_batch_size`).
        micro_batch: sequences per forward on one rank (`train_micro_batch_size_per_gpu`).
        dp_rank: rank on the dp axis.
        dp_degree: degree of the dp axis.
        seed: seed of the order.
        shuffle: False reads in the order of the dataset in every epoch.
        reads: False on ranks that train on what other ranks read: the position advances, but `steps` yields
            empty lists.
        drop_last: drop an incomplete global batch at the end of an epoch; False fills it up with the first
            sequences of the same epoch, so that every rank has work of the same shape.

    Attributes:
        epoch: the epoch of the next step, from 0.
        samples: sequences of that epoch that have been consumed, over all ranks.

    Raises:
        ConfigError: the numbers do not divide, or the data set is smaller than one global batch.
    """

    def __init__(
        self,
        dataset: Sequences,
        *,
        global_batch: int,
        micro_batch: int,
        dp_rank: int,
        dp_degree: int,
        seed: int,
        shuffle: bool = True,
        drop_last: bool = True,
        reads: bool = True,
    ) -> None:
        _check_numbers(len(dataset), global_batch, micro_batch, dp_rank, dp_degree)
        self.dataset = dataset
        self.global_batch = global_batch
        self.micro_batch = micro_batch
        self.dp_rank = dp_rank
        self.dp_degree = dp_degree
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.reads = reads
        self.epoch = 0
        self.samples = 0
        self._order: tuple[int, np.ndarray] | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of optimizer steps per epoch."""
        whole, rest = divmod(len(self.dataset), self.global_batch)
        return whole + (1 if rest and not self.drop_last else 0)

    @property
    def microbatches_per_step(self) -> int:
        """Return the number of microbatches per rank and step: the gradient accumulation."""
        return self.global_batch // (self.micro_batch * self.dp_degree)

    def __len__(self) -> int:
        """Return the number of microbatches per rank and epoch."""
        return self.steps_per_epoch * self.microbatches_per_step

    def __iter__(self) -> Iterator[Batch]:
        """Yield the microbatches of this rank, from the current position to the end of the epoch."""
        epoch = self.epoch
        while self.epoch == epoch:
            *first, last = self._microbatches()
            yield from first
            self._advance()  # before the yield: a state saved after this step continues with the next one
            yield last

    def steps(self) -> Iterator[list[Batch]]:
        """Yield one list of microbatches per optimizer step, endlessly over epochs."""
        while True:
            microbatches = self._microbatches() if self.reads else []
            self._advance()
            yield microbatches

    def global_indices(self) -> np.ndarray:
        """Return the indices into the dataset of the next step's global batch, over all ranks: int64 [global_batch]."""
        order = self._epoch_order()
        indices = order[self.samples : self.samples + self.global_batch]
        return np.concatenate([indices, order[: self.global_batch - len(indices)]])

    def set_epoch(self, epoch: int) -> None:
        """Move to the start of `epoch`; in the middle of that same epoch, keep the position."""
        if epoch != self.epoch:
            self.epoch, self.samples = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """Return the position in the data, in sequences over all ranks: any topology can continue from it."""
        return {"epoch": self.epoch, "samples": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of a `state_dict`, which another topology or batch size may have saved."""
        self.epoch, self.samples = int(state["epoch"]), int(state["samples"])
        self._roll_over()

    def after(self, samples: int) -> dict[str, int]:
        """Return the position after `samples` sequences, over all ranks and epochs."""
        of_epoch = self.steps_per_epoch * self.global_batch
        return {"epoch": samples // of_epoch, "samples": samples % of_epoch}

    def _microbatches(self) -> list[Batch]:
        share = self.global_batch // self.dp_degree
        start = self.dp_rank * share
        mine = self.global_indices()[start : start + share]
        return [self._collate(mine[i : i + self.micro_batch]) for i in range(0, share, self.micro_batch)]

    def _collate(self, indices: np.ndarray) -> Batch:
        items = [_as_batch(self.dataset[int(index)]) for index in indices]
        return {name: torch.stack([item[name] for item in items]) for name in items[0]}

    def _epoch_order(self) -> np.ndarray:
        if self._order is None or self._order[0] != self.epoch:
            count = len(self.dataset)
            random = np.random.default_rng((self.seed, self.epoch))
            self._order = (self.epoch, random.permutation(count) if self.shuffle else np.arange(count))
        return self._order[1]

    def _advance(self) -> None:
        self.samples += self.global_batch
        self._roll_over()

    def _roll_over(self) -> None:
        """Begin the next epoch as soon as this one has no global batch left."""
        left = len(self.dataset) - self.samples
        if left < (self.global_batch if self.drop_last else 1):
            self.epoch, self.samples = self.epoch + 1, 0


def _as_batch(item: torch.Tensor | Batch) -> Batch:
    return {"input_ids": item, "labels": item} if isinstance(item, torch.Tensor) else item


def _check_numbers(count: int, global_batch: int, micro_batch: int, dp_rank: int, dp_degree: int) -> None:
    if min(global_batch, micro_batch, dp_degree) < 1 or global_batch % (micro_batch * dp_degree):
        raise ConfigError(
            f"A global batch of {global_batch} cannot be divided among {dp_degree} data-parallel ranks "
            f"in microbatches of {micro_batch}.",
            where="train_batch_size",
            fix=f"Make it a multiple of {micro_batch} x {dp_degree}.",
        )
    if not 0 <= dp_rank < dp_degree:
        raise ConfigError(f"Data-parallel rank {dp_rank} is out of range: there are {dp_degree} ranks.")
    if count < global_batch:
        raise ConfigError(
            f"The data set has {count} sequences, fewer than one global batch of {global_batch}.",
            where="train_batch_size",
            fix=f"Use more text, a shorter --seq-length, or a train_batch_size of at most {count}.",
        )
