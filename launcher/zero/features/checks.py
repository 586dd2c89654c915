"""The per-step comparisons of `enable_sanity_checks`, for errors that would otherwise only show in the loss.

- the order of collectives: ranks that gather different units at the same time receive each other's bytes
  without an error;
- copies: parameters that several dp or tp ranks hold must be bitwise identical;
- gradients: in fp32 and bf16 nothing else checks that they are finite.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Collection
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from launcher.comm import Axis, CollectiveRecord, record_collectives
from launcher.comm.plain import gather_plain
from launcher.errors import LauncherError, first_names
from launcher.zero.norm import held_by_several

if TYPE_CHECKING:
    from launcher.zero.model import ZeroModel

# the collectives of each axis, whose order must be the same on all its ranks
CollectiveStreams = dict[str, list[str]]
KEY = "zero_optimization.enable_sanity_checks"


class StepChecks:
    """Records this rank's collectives, and compares the ranks in each step.

    Args:
        zero: the model.
    """

    def __init__(self, zero: ZeroModel) -> None:
        self.zero = zero
        self._recording = record_collectives()
        self._records = self._recording.__enter__()

    def remove(self) -> None:
        """Stop recording."""
        self._recording.__exit__(None, None, None)

    def compare(self) -> None:
        """Compare the ranks. Collective; called after the backward and before the optimizer step.

        Raises:
            LauncherError: on every rank: the first difference found, and the ranks that differ.
        """
        streams = _streams(self._records, activations=(self.zero.tp.name, "ep"))
        self._records.clear()
        digest = {name: zlib.crc32("\n".join(lines).encode()) for name, lines in streams.items()}
        every = self._gather((digest, self._copies(), self._not_finite()))
        if any(digests != every[0][0] for digests, _, _ in every):
            _raise_order(self._gather(streams))
        for rank, (_, copies, _) in enumerate(every):
            wrong = [name for name, value in copies.items() if _first(name, every) != value]
            if wrong:
                raise LauncherError(
                    f"parameters differ on rank {rank} from lower ranks: {first_names(wrong)}",
                    where=KEY,
                    fix="change parameters inside launcher.zero.GatheredParameters(..., modifier_rank=0)",
                )
        bad = [f"{name} (rank {rank})" for rank, (_, _, names) in enumerate(every) for name in names]
        if bad:
            raise LauncherError(
                f"{len(bad)} gradients are not finite: {first_names(bad)}",
                where=KEY,
                fix="check the loss and the data of this step, or lower the learning rate",
            )

    def _gather(self, mine: Any) -> list[Any]:
        """Gather a value from every rank, ordered by dp rank, then tp rank."""
        columns = _gather_along(self.zero.tp, _gather_along(self.zero.axes.dp, mine))
        return [column[dp] for dp in range(self.zero.axes.dp.degree) for column in columns]

    def _copies(self) -> dict[str, int]:
        """Return checksums of the values that other ranks hold, too."""
        copies, tp = {}, self.zero.tp
        for flat in self.zero.flats:
            ep, shard = flat.slots[0].split_axis, flat.axes.shard
            part = "".join(
                f" of {axis.name} rank {axis.rank}" for axis in dict.fromkeys((tp, ep)) if axis.degree > 1
            )
            values = flat.values().load()
            if not flat.sharded and flat.full is not None:
                copies[f"unit {flat.name}{part}"] = _checksum(flat.full)
            elif flat.axes.replicate.degree > 1:
                copies[f"shard {shard.rank} of unit {flat.name}{part}"] = _checksum(values)
            for at, held, _ in held_by_several(flat, flat.owned):
                name = (
                    f"the part of unit {flat.name} on {held.holders} tp ranks ({held.group}, dp rank "
                    f"{flat.axis.rank})"
                )
                copies[name] = copies.get(name, 0) + _checksum(values[at])
            flat.rest()
        return copies

    def _not_finite(self) -> list[str]:
        if self.zero.policy.param_dtype == torch.float16:  # in fp16 the loss scaler handles overflows
            return []
        names = []
        for gradient in self.zero.gradients:
            if gradient.share.isfinite().all():
                continue
            pieces = gradient.flat.slices(gradient.owned, gradient.flat.shard_span)
            names += [piece.name for piece in pieces if not piece.data.isfinite().all()]
        return names


def _gather_along(axis: Axis, mine: Any) -> list[Any]:
    return [mine] * axis.degree if axis.group is None else gather_plain(mine, axis.group)


def _streams(records: list[CollectiveRecord], activations: Collection[str]) -> CollectiveStreams:
    """Return the collectives by axis. Sizes along the axes `activations` are omitted, because they depend on
    the number of tokens of a rank."""
    streams: CollectiveStreams = defaultdict(list)
    for r in records:
        kind = "gathers" if r.op in ("all_gather", "broadcast") else "reductions"
        size = "" if r.axis in activations else f" of {r.numel} elements"
        streams[f"{kind} along {r.axis}"].append(f"{r.op} {r.tag}{size}")
    return dict(streams)


def _raise_order(every: list[CollectiveStreams]) -> None:
    for name in sorted({name for streams in every for name in streams}):
        lines = [streams.get(name, []) for streams in every]
        for place, at in enumerate(zip_longest(*lines, fillvalue="nothing")):
            other = next((rank for rank, line in enumerate(at) if line != at[0]), None)
            if other is not None:
                raise LauncherError(
                    f"collective order mismatch ({name}): #{place + 1} since the last step is {at[0]} "
                    f"on rank 0 but {at[other]} on rank {other}",
                    where=KEY,
                    fix="run the same modules in the same order, and equally often, on every rank",
                )


def _first(name: str, every: list[tuple[Any, dict[str, int], Any]]) -> int:
    return next(copies[name] for _, copies, _ in every if name in copies)


def _checksum(values: Tensor) -> int:
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    return int(values.detach().view(whole).sum(dtype=torch.int64))
