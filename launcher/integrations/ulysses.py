"""`deepspeed.runtime.sequence_parallel.ulysses_sp`: Ulysses for transformers models, and its data loader.

`initialize(mpu=...)` modifies the model itself (`sequence/apply.py`). transformers is not patched, so other
models of the process are unaffected."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from launcher.comm import Axis, all_to_all
from launcher.comm.plain import gather_plain
from launcher.data.documents import IGNORED
from launcher.errors import ArgumentsError
from launcher.integrations.sequence_groups import use
from launcher.sequence.groups import SequenceGroups, SlicedSequences
from launcher.sequence.inputs import IDS, LABELS, POSITIONS, SHIFTED, labels_of_next, padded_to

_OF_KERNELS = ("cu_seq_lens", "max_length_")
"""Prefixes of keys that repeat position_ids for FlashAttention; dropped because they describe full rows."""
TAG, WHERE = "data/slices", "UlyssesSPDataLoaderAdapter"


class UlyssesSPAttentionHF:
    """Attention of a transformers model over sequence shards."""

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str,
        sequence_parallel_size: int,
        micro_batch_size: int,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> SequenceGroups | None:
        """Return the `mpu` for `initialize(mpu=...)`, or None if `sequence_parallel_size` is 1.

        Args:
            model_name_or_path: the model, or an object with its `config`; a name or path is ignored.
            core_attn_implementation: the attention implementation of the model.
            sequence_parallel_size: number of ranks that share a sequence.
            micro_batch_size, seq_length, seq_length_is_variable, max_length: unused; every batch may have a
                different size.
            disable_in_eval: in evaluation, every rank computes full sequences of its own.

        Raises:
            ArgumentsError: the model uses another attention implementation.
        """
        if sequence_parallel_size == 1:
            return None
        config = getattr(model_name_or_path, "config", None)
        of_model = getattr(config, "_attn_implementation", None)
        if of_model is not None and of_model != core_attn_implementation:
            raise ArgumentsError(
                f"core_attn_implementation {core_attn_implementation!r} does not match model config "
                f"attn_implementation {of_model!r}",
                where="register_with_transformers()",
                fix=f'pass core_attn_implementation="{of_model}"',
            )
        return use(SlicedSequences.of(sequence_parallel_size, shares_in_eval=not disable_in_eval))


class UlyssesSPDataLoaderAdapter:
    """A loader that distributes slices of all ranks' batches: first of rank 0's batch, then of rank 1's, ...

    Each step of the wrapped loader therefore yields as many batches as there are ranks, and every rank gets
    one slice of each. A batch may have any length: it is padded to a multiple of the number of ranks.

    Args:
        dl: yields mappings whose tensors are [batch, tokens, ...].
        sp_rank, sp_world_size: unused; taken from the group.
        sp_group: the ranks that share a sequence.
        device: device of the slices.
    """

    def __init__(self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any) -> None:
        self.dl, self.device = dl, torch.device(device)
        self.axis = Axis.over("cp", sp_group)
        self.iter: Iterator[Any] = iter(dl)
        self.micro_batches: deque[dict[str, Any]] = deque()

    def __len__(self) -> int:
        return len(self.dl) * self.axis.degree

    def __iter__(self) -> UlyssesSPDataLoaderAdapter:
        return self

    def __next__(self) -> dict[str, Any]:
        if not self.micro_batches:
            self.refill()
        return self.micro_batches.popleft()

    def refill(self) -> None:
        """Exchange the next batch of each rank. Every rank must call it.

        Raises:
            StopIteration: on every rank, if a loader of any rank is exhausted. The next call restarts the
                loader.
            ArgumentsError: a batch cannot be sliced, or the ranks' batches have different keys.
        """
        batch = next(self.iter, None)
        ready = None if batch is None else _ready(batch, self.axis.degree)
        kinds = gather_plain(None if ready is None else _described(ready), self.axis.group)
        if ready is None or None in kinds:
            self.iter = iter(self.dl)
            raise StopIteration
        if any(kind.keys() != kinds[0].keys() for kind in kinds):
            found = " and ".join(", ".join(kind) for kind in kinds)
            raise ArgumentsError(f"batches of {self.axis.members} have different keys: {found}", where=WHERE)
        values = {key: self._exchanged(ready[key], [kind[key] for kind in kinds]) for key in kinds[0]}
        self.micro_batches.extend(
            {key: of_ranks[rank] for key, of_ranks in values.items()} for rank in range(self.axis.degree)
        )

    def _exchanged(self, mine: Any, kinds: list[Any]) -> list[Any]:
        """Return this rank's slice of the value in each rank's batch; non-tensor values are not sliced."""
        if not isinstance(mine, Tensor):
            return [kind["value"] for kind in kinds]
        outgoing = [_bytes_of(part.to(self.device)) for part in mine.chunk(self.axis.degree, 1)]
        incoming = []
        for kind in kinds:
            rows, length, *more = kind["shape"]
            shape = (rows, length // self.axis.degree, *more)
            incoming.append(torch.empty(shape, dtype=getattr(torch, kind["dtype"]), device=self.device))
        own = _bytes_of(incoming[self.axis.rank])
        own.copy_(outgoing[self.axis.rank])
        all_to_all(outgoing, [_bytes_of(part) for part in incoming], self.axis, TAG).wait()
        return incoming


def _ready(batch: Mapping[str, Any], degree: int) -> dict[str, Any]:
    """Return a batch whose tensors can be sliced, with position ids and shifted labels."""
    rows, length = batch[IDS].shape[:2]
    given = {key: value for key, value in batch.items() if not key.startswith(_OF_KERNELS)}
    found = {**given, SHIFTED: labels_of_next(batch)}
    if found[SHIFTED] is None:
        raise ArgumentsError(
            f"the batch has no {LABELS} and no {SHIFTED}: a script that computes its loss from whole sequences "
            "(DPO, rewards) would compute it from slices",
            where=WHERE,
            fix="train without sp_size, or give every batch labels",
        )
    found.pop(LABELS, None)
    if POSITIONS not in found:
        found[POSITIONS] = torch.arange(length, device=batch[IDS].device).expand(rows, -1)
    padded = -(-length // degree) * degree
    for key, value in found.items():
        if not isinstance(value, Tensor):
            continue
        if value.dim() < 2 or value.shape[1] != length:
            raise ArgumentsError(
                f"{key} has shape {tuple(value.shape)}, which cannot be sliced like {IDS} {tuple(batch[IDS].shape)}",
                where=WHERE,
                fix="remove it from the batch, or pass it as [batch, tokens, ...]",
            )
        found[key] = padded_to(value, padded, IGNORED if key == SHIFTED else 0)
    return found


def _described(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a batch that other ranks need before they receive its tensors."""
    return {
        key: {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        if isinstance(value, Tensor)
        else {"value": value}
        for key, value in batch.items()
    }


def _bytes_of(x: Tensor) -> Tensor:
    """Return a tensor as flat bytes; a view if it is contiguous."""
    return x.contiguous().view(-1).view(torch.uint8)
