"""Collectives on tensors: tagged, recorded and timed here, and carried out by the transport of the axis.

Every call has a tag `unit/phase` that identifies the caller; the tag names the profiler range and the records
that tests count. A call returns a `Pending`; after its `wait()` the result is in place.

All buffers are flat. With N ranks on the axis a buffer of N * s elements is N slices of s; rank r owns slice
r.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.profiler import record_function

from launcher.comm.mesh import Axis
from launcher.comm.observe import Timing, observers
from launcher.comm.pending import Pending
from launcher.comm.record import CollectiveRecord, keep_record, record_collectives
from launcher.monitor.clock import now

P = ParamSpec("P")
B = TypeVar("B", Tensor, Sequence[Tensor])


def _timed(start: Callable[Concatenate[B, P], Pending]) -> Callable[Concatenate[B, P], Pending]:
    """Return the collective `start`, timed while there are observers (`observe.py`)."""

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


@_timed
def all_gather(full: Tensor, axis: Axis, tag: str, *, within: slice = slice(None)) -> Pending:
    """Fill `full` [N * s] from the slices of all ranks; slice r already holds this rank's part.

    Args:
        within: only these elements of every slice, so that a large buffer can be gathered in several calls.
    """
    if axis.levels is not None:
        return _gather_by_levels([part[within] for part in full.chunk(axis.degree)], *axis.levels, tag)
    _note("all_gather", tag, axis, full, _numel(full, axis, within))
    with profiled(axis, tag, "all_gather"):
        return axis.transport(full).all_gather(full, within)


def _gather_by_levels(slices: list[Tensor], across: Axis, inside: Axis, tag: str) -> Pending:
    """Gather in two hops: first the slices of ranks at the same place in all nodes, then those of the ranks
    inside a node."""
    first = _gather(slices[inside.rank :: inside.degree], across, tag)

    def rest() -> None:
        nodes = [slices[at : at + inside.degree] for at in range(0, len(slices), inside.degree)]
        for pending in [_gather(node, inside, tag) for node in nodes]:
            pending.wait()

    return Pending([first], rest)


def _gather(slices: list[Tensor], axis: Axis, tag: str) -> Pending:
    """Fill every slice from its rank, at whatever addresses the slices are."""
    _note("all_gather", tag, axis, slices[0], slices[0].numel() * axis.degree)
    with profiled(axis, tag, "all_gather"):
        return axis.transport(slices[0]).all_gather_slices(slices)


@_timed
def reduce_scatter(
    full: Tensor, out: Tensor, axis: Axis, tag: str, *, within: slice = slice(None), accumulate: bool = False
) -> Pending:
    """Sum slice r of every rank's `full` [N * s] into `out` [s] of rank r.

    Args:
        full: this rank's contribution. It is not changed, and must not be changed before `wait()` has
            returned.
        out: receives the sum; may be slice r of `full` itself, and may have a wider dtype, in which the sum
            is computed.
        within: only these elements of every slice, and of `out`, so that a large buffer can be reduced in
            several calls.
        accumulate: add to `out` instead of overwriting it.
    """
    _note("reduce_scatter", tag, axis, full, _numel(full, axis, within))
    with profiled(axis, tag, "reduce_scatter"):
        return axis.transport(full).reduce_scatter(full, out[within], within, accumulate=accumulate)


@_timed
def all_reduce(buffer: Tensor, axis: Axis, tag: str) -> Pending:
    """Sum `buffer` over the axis, in place."""
    _note("all_reduce", tag, axis, buffer, buffer.numel(), rounds=2)
    with profiled(axis, tag, "all_reduce"):
        return axis.transport(buffer).all_reduce(buffer)


@_timed
def broadcast(buffer: Tensor, axis: Axis, tag: str, *, source: int = 0) -> Pending:
    """Copy the buffer of coordinate `source` of the axis to all its ranks, in place."""
    _note("broadcast", tag, axis, buffer, buffer.numel())
    with profiled(axis, tag, "broadcast"):
        return axis.transport(buffer).broadcast(buffer, source)


@_timed
def all_to_all(outgoing: Sequence[Tensor], incoming: Sequence[Tensor], axis: Axis, tag: str) -> Pending:
    """Send a separate flat tensor to every rank, and receive one from each.

    Args:
        outgoing: by coordinate; this rank's own entry is not sent. Sizes may differ, and may be 0.
        incoming: by coordinate, with the sizes that the other ranks send; this rank's own entry is not
            written.
    """
    sent = sum(_nbytes(outgoing[peer]) for peer in axis.peers)
    numel, nbytes = sum(part.numel() for part in outgoing), sum(map(_nbytes, outgoing))
    keep_record(CollectiveRecord("all_to_all", tag, axis.name, numel, sent, nbytes), axis)
    with profiled(axis, tag, "all_to_all"):
        return axis.transport(outgoing[axis.rank]).all_to_all(outgoing, incoming)


def profiled(axis: Axis, tag: str, op: str) -> AbstractContextManager[Any]:
    """Return the profiler range of a transfer along an axis; a null context if nothing is sent."""
    return nullcontext() if axis.group is None else profiler_range(tag, op)


def profiler_range(*names: object) -> AbstractContextManager[Any]:
    """Return a range `name/name` for traces of torch's profiler.

    Without a profiler it is a null context: opening a range costs more than most kernels of a small model, and steps
    have hundreds.
    """
    profiling: bool = torch.autograd._profiler_enabled()  # type: ignore[no-untyped-call]
    return record_function("/".join(map(str, names))) if profiling else nullcontext()


def _note(op: str, tag: str, axis: Axis, like: Tensor, numel: int, rounds: int = 1) -> None:
    """Record a collective of `numel` elements, all slices together, with the dtype of `like`."""
    nbytes = numel * like.element_size()
    sent = nbytes * rounds * (axis.degree - 1) // axis.degree
    keep_record(CollectiveRecord(op, tag, axis.name, numel, sent, nbytes), axis)


def _numel(full: Tensor, axis: Axis, within: slice) -> int:
    """Return how many elements of a buffer of all ranks take part."""
    return axis.degree * len(range(*within.indices(full.numel() // axis.degree)))


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
