"""The few collectives on tensors: the one place that decides how they go over the network.

Every call carries a tag `unit/phase` that says who asked; the tag names the profiler range and the records that
tests count. A call returns a `Pending`; `wait()` gives the result.

All buffers are flat. With N ranks on the axis a buffer of N * s elements is N slices of s; rank r owns slice r.

CPU ranks of one machine read each other's memory (`memory.py`). Elsewhere, gloo's own reduce-scatter is an all-reduce
of a copy and its all-gather copies twice, so the two are made here of pairwise sends: each rank sends slice j straight
to rank j. Either way the bytes that travel are the optimum, (N - 1) / N of the buffer, and the sum is taken in rank
order: the same number on every run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from launcher.comm.memory import Add, Waitable
from launcher.comm.mesh import Axis
from launcher.comm.observe import Timing, observers
from launcher.monitor import flight_recorder
from launcher.monitor.clock import now

# torch 2.13 renamed these two; older versions know only the second name.
_native_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_native_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Pairwise messages of two collectives of an axis may be in flight together; a running number keeps them apart. Gathers
# and reductions are numbered apart, for their order relative to each other may differ from rank to rank.
_MESSAGES = 1 << 20


@dataclass(frozen=True)
class CollectiveRecord:
    """One collective as this rank saw it. `sent` is in bytes, by the theory of the ring or pairwise algorithm;
    `nbytes` are those of the whole buffer."""

    op: str
    tag: str
    axis: str
    numel: int
    sent: int
    nbytes: int


class Pending:
    """A collective in flight. It holds its buffers: keeping the reference is what keeps them alive."""

    def __init__(self, works: Sequence[Waitable], finish: Callable[[], None] | None = None) -> None:
        self._works, self._finish = list(works), finish
        self.timing: Timing | None = None

    def wait(self) -> None:
        """Block until the result is in place (on CUDA: make the current stream wait for it). Safe to call again."""
        works, self._works = self._works, []
        timing, self.timing = self.timing, None
        if timing is not None:
            timing.begin_wait()
        for work in works:
            work.wait()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        if timing is not None:
            timing.end_wait()


_recorders: list[list[CollectiveRecord]] = []
_beacon = flight_recorder.mine()


@contextmanager
def record_collectives() -> Iterator[list[CollectiveRecord]]:
    """Collect a record of every collective started inside the `with`."""
    records: list[CollectiveRecord] = []
    _recorders.append(records)
    try:
        yield records
    finally:
        _recorders[:] = [
            others for others in _recorders if others is not records
        ]  # equal lists are not the same


def _note(op: str, tag: str, axis: Axis, buffer: Tensor, times: int) -> None:
    sent = _nbytes(buffer) * times * (axis.degree - 1) // axis.degree
    numel = buffer.numel() * (axis.degree if "_" in op and op != "all_reduce" else 1)
    keep_record(CollectiveRecord(op, tag, axis.name, numel, sent, numel * buffer.element_size()), axis)


def keep_record(record: CollectiveRecord, axis: Axis) -> None:
    """Give the record to everybody who collects such; nothing is sent along an axis of one rank."""
    if axis.degree > 1:
        if _beacon is not None:
            among = "" if record.op == "send" else axis.members
            _beacon.show(f"{record.op} of {record.tag}", among)
        for records in _recorders:
            records.append(record)


def show_wait(text: str) -> None:
    """Let who watches this process know what it waits for by itself."""
    if _beacon is not None:
        _beacon.show(text)


P = ParamSpec("P")
B = TypeVar("B", Tensor, Sequence[Tensor])


def _timed(start: Callable[Concatenate[B, P], Pending]) -> Callable[Concatenate[B, P], Pending]:
    """The collective `start`, timed while somebody observes (`observe.py`)."""

    @wraps(start)
    def begin(buffer: B, *args: P.args, **kwargs: P.kwargs) -> Pending:
        if not observers:
            return start(buffer, *args, **kwargs)
        device = buffer.device if isinstance(buffer, Tensor) else buffer[0].device
        started = now(device)
        with record_collectives() as records:
            pending = start(buffer, *args, **kwargs)
        if records:
            pending.timing = Timing(records[0], device, started)
        return pending

    return begin


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _own(full: Tensor, axis: Axis, within: slice) -> Tensor:
    """This rank's slice of a buffer of all."""
    size = full.numel() // axis.degree
    return full[axis.rank * size : (axis.rank + 1) * size][within]


@_timed
def all_gather(full: Tensor, axis: Axis, tag: str, *, within: slice = slice(None)) -> Pending:
    """Fill `full` [N * s] from the slices of all ranks; slice r already holds this rank's part.

    Args:
        within: only these elements of every slice: a large buffer is gathered in several calls.
    """
    if (
        axis.group is None and axis.levels is None
    ):  # of a thousand ranks that are not there, none needs its slice
        _note("all_gather", tag, axis, _own(full, axis, within), axis.degree)
        return Pending([])
    slices = [part[within] for part in full.chunk(axis.degree)]
    if axis.levels is not None:
        return _gather_by_levels(slices, *axis.levels, tag)
    return _gather(slices, full if slices[0].numel() * axis.degree == full.numel() else None, axis, tag)


def _gather_by_levels(slices: list[Tensor], across: Axis, inside: Axis, tag: str) -> Pending:
    """First every rank gathers the slices of its place in all nodes, then each node exchanges what its ranks have."""
    first = _gather(slices[inside.rank :: inside.degree], None, across, tag)

    def rest() -> None:
        nodes = [slices[at : at + inside.degree] for at in range(0, len(slices), inside.degree)]
        for pending in [_gather(node, None, inside, tag) for node in nodes]:
            pending.wait()

    return Pending([first], rest)


def _gather(slices: list[Tensor], full: Tensor | None, axis: Axis, tag: str) -> Pending:
    """Fill every slice from its rank; `full` is where they lie end to end, if they do."""
    _note("all_gather", tag, axis, slices[0], axis.degree)
    if axis.group is None:
        return Pending([])
    with record_function(f"{tag}/all_gather"):
        mine = slices[axis.rank]
        if mine.device.type != "cpu":
            if full is not None:
                return Pending([_native_all_gather(full, mine, group=axis.group, async_op=True)])
            return Pending([dist.all_gather(slices, mine, group=axis.group, async_op=True)])
        message = next(axis.gathers) % _MESSAGES
        if axis.memory is not None and mine.numel():
            return Pending(axis.memory.gather(slices, message))
        works: list[Waitable] = [axis.group.recv([slices[peer]], peer, message) for peer in axis.peers]
        works += [axis.group.send([mine], peer, message) for peer in axis.peers]
        return Pending(works)


@_timed
def reduce_scatter(
    full: Tensor, out: Tensor, axis: Axis, tag: str, *, within: slice = slice(None), accumulate: bool = False
) -> Pending:
    """Sum slice r of every rank's `full` [N * s] into `out` [s] of rank r.

    Args:
        full: this rank's contribution; not changed, and must not be until the result was waited for.
        out: where the sum goes; may be slice r of `full` itself, and may have a wider dtype, in which it is summed.
        within: only these elements of every slice, and of `out`: a large buffer is reduced in several calls.
        accumulate: add to `out` instead of overwriting it.
    """
    out, mine = out[within], _own(full, axis, within)
    _note("reduce_scatter", tag, axis, mine, axis.degree)
    if axis.reductions is None:
        if accumulate:
            out.add_(mine)
        elif out.data_ptr() != mine.data_ptr():
            out.copy_(mine)
        return Pending([])
    slices = [part[within] for part in full.chunk(axis.degree)]
    with record_function(f"{tag}/reduce_scatter"):
        if full.device.type != "cpu":
            return _native(full, slices, out, axis, accumulate)
        message = next(axis.reduced) % _MESSAGES
        if axis.memory is not None and slices[0].numel():
            return Pending(axis.memory.reduce_scatter(slices, message, _summing(out, accumulate)))
        received = torch.empty(axis.degree - 1, out.numel(), dtype=full.dtype, device=full.device)
        parts = {peer: received[peer - (peer > axis.rank)] for peer in axis.peers}
        works: list[Waitable] = [axis.reductions.recv([parts[peer]], peer, message) for peer in axis.peers]
        works += [axis.reductions.send([slices[peer]], peer, message) for peer in axis.peers]
        parts[axis.rank] = slices[axis.rank]
        return Pending(works, lambda: _sum_in_rank_order(parts, out, accumulate))


def _adding(out: Tensor) -> Add:
    return _summing(out, accumulate=False)


def _summing(out: Tensor, accumulate: bool) -> Add:
    return lambda blocks, where: _sum_in_rank_order(blocks, out[where], accumulate)


def _sum_in_rank_order(parts: dict[int, Tensor], out: Tensor, accumulate: bool) -> None:
    first, second, *rest = (parts[rank] for rank in sorted(parts))
    if accumulate:
        out.add_(first).add_(second)
    elif any(part.data_ptr() == out.data_ptr() for part in rest):
        # `out` is the slice of a rank that is not summed yet; the first part was received, so it may be overwritten.
        for part in (second, *rest):
            first.add_(part)
        out.copy_(first)
        return
    elif first.dtype == out.dtype:
        torch.add(first, second, out=out)
    else:
        out.copy_(first)
        out.add_(second)
    for part in rest:
        out.add_(part)


def _native(full: Tensor, slices: list[Tensor], out: Tensor, axis: Axis, accumulate: bool) -> Pending:
    direct = not accumulate and out.dtype == full.dtype
    result = out if direct else torch.empty(out.numel(), dtype=full.dtype, device=full.device)
    if len(slices) * out.numel() == full.numel():
        work = _native_reduce_scatter(result, full, group=axis.reductions, async_op=True)
    else:
        work = dist.reduce_scatter(result, slices, group=axis.reductions, async_op=True)
    if direct:
        return Pending([work])

    def finish() -> None:
        if accumulate:
            out.add_(result)
        else:
            out.copy_(result)

    return Pending([work], finish)


@_timed
def all_reduce(buffer: Tensor, axis: Axis, tag: str) -> Pending:
    """Sum `buffer` over the axis, in place."""
    _note("all_reduce", tag, axis, buffer, 2)
    if axis.reductions is None:
        return Pending([])
    with record_function(f"{tag}/all_reduce"):
        if axis.memory is not None and buffer.is_contiguous() and buffer.numel():
            messages = next(axis.reduced) % _MESSAGES, next(axis.reduced) % _MESSAGES
            return Pending(axis.memory.all_reduce(buffer.view(-1), messages, _adding))
        return Pending([dist.all_reduce(buffer, group=axis.reductions, async_op=True)])


@_timed
def broadcast(buffer: Tensor, axis: Axis, tag: str, *, source: int = 0) -> Pending:
    """Copy the buffer of coordinate `source` of the axis to all its ranks, in place."""
    _note("broadcast", tag, axis, buffer, 1)
    if axis.group is None:
        return Pending([])
    with record_function(f"{tag}/broadcast"):
        return Pending([dist.broadcast(buffer, group=axis.group, group_src=source, async_op=True)])


@_timed
def all_to_all(outgoing: Sequence[Tensor], incoming: Sequence[Tensor], axis: Axis, tag: str) -> Pending:
    """Send a flat tensor of its own to every rank, and receive one from each.

    Args:
        outgoing: by coordinate; this rank's own entry is not sent. Sizes may differ, and may be 0.
        incoming: by coordinate, of the sizes that the others send; this rank's own entry is not written.
    """
    sent = sum(_nbytes(outgoing[peer]) for peer in axis.peers)
    numel = sum(part.numel() for part in outgoing)
    nbytes = sum(_nbytes(part) for part in outgoing)
    keep_record(CollectiveRecord("all_to_all", tag, axis.name, numel, sent, nbytes), axis)
    if axis.reductions is None:
        return Pending([])
    with record_function(f"{tag}/all_to_all"):
        if outgoing[axis.rank].device.type != "cpu":
            mine = outgoing[axis.rank].new_empty(0)  # NCCL would copy this rank's own entry
            out = [mine if rank == axis.rank else part for rank, part in enumerate(outgoing)]
            into = [mine if rank == axis.rank else part for rank, part in enumerate(incoming)]
            return Pending([dist.all_to_all(into, out, group=axis.reductions, async_op=True)])
        message = next(axis.exchanged) % _MESSAGES
        works: list[Waitable] = []
        for peer in axis.peers:
            if incoming[peer].numel():
                works.append(axis.reductions.recv([incoming[peer]], peer, message))
        for peer in axis.peers:
            if outgoing[peer].numel():
                works.append(axis.reductions.send([outgoing[peer]], peer, message))
        return Pending(works)
