"""Ring attention: each rank keeps its chunk's queries and attends to all chunks' keys and values in turn.

[Note: Who sends to whom]
In step i, a rank receives the chunk of the rank i before it, directly from that rank, and sends its own chunk
to the rank i after it. So every chunk is sent by its owner, with as many messages as on a ring, and a chunk
is not sent to ranks whose queries may see none of it. The chunk of step i + 1 is in flight while attention to
the chunk of step i is computed. In backward, the gradients of a chunk's keys and values go straight back to
its owner, which adds them in step order, so the sums are deterministic. The send and the receive of a step
are one exchange: if all ranks sent first and received afterwards, NCCL would deadlock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from launcher.comm import Axis, all_to_all
from launcher.comm.pending import Pending
from launcher.sequence.kernels import Scores, attend, attend_backward, merged
from launcher.sequence.layout import SequenceLayout
from launcher.sequence.masks import AttentionMask, Visibility

TAG = "attention/ring"


@dataclass(frozen=True)
class RingCall:
    """The arguments of one attention over the ring.

    Args:
        axis: the ring; its degree is 1 if only Ulysses is used.
        layout, length: layout and length of the padded sequence.
        mask: mask of the layer.
        scores: how the layer computes its scores.
    """

    axis: Axis
    layout: SequenceLayout
    length: int
    mask: AttentionMask
    scores: Scores

    def runs(self, chunk: int) -> tuple[range, ...]:
        return self.layout.runs(self.length, chunk)

    def sees(self, queries: int, keys: int) -> bool:
        """Return whether any query of one chunk may see any key of the other."""
        return any(
            self.mask.visibility(mine, other) is not Visibility.NONE
            for mine in self.runs(queries)
            for other in self.runs(keys)
        )

    def pairs(self, keys: int) -> Iterator[tuple[slice, range, slice, range]]:
        """Yield each run of this rank's queries with each run of a chunk's keys, as (slice, positions)."""
        for mine, queries in _placed(self.runs(self.axis.rank)):
            for place, positions in _placed(self.runs(keys)):
                yield mine, queries, place, positions


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, call: RingCall
) -> tuple[Tensor, Tensor]:
    """Return the attention of this rank's queries to the keys of all ranks, and its log-sum-exp. Every rank
    of the ring must call it. Backward needs the gradients of both outputs: see [Note: Attention in backward].

    Args:
        query: [B, H, C, D], C positions of this rank's chunk.
        key, value: [B, G, C, D] and [B, G, C, E].
        sinks: [H] scores of a key without a value that every query sees (gpt-oss); None: no sinks.

    Returns:
        ([B, H, C, E] in the dtype of the query, fp32 [B, H, C]).
    """
    found: tuple[Tensor, Tensor] = _Ring.apply(query, key, value, sinks, call)  # type: ignore[no-untyped-call]
    return found


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, call: RingCall
    ) -> tuple[Tensor, Tensor]:
        outs, sums = _Pieces(), _Pieces()  # per local run: attention to the chunks so far, and log-sum-exp
        with torch.no_grad():
            for chunk, keys, values in _Chunks(key, value, call):
                for mine, queries, place, positions in call.pairs(chunk):
                    block = call.mask.block(queries, positions)
                    if block.visibility is Visibility.NONE:
                        continue
                    found = attend(
                        query[:, :, mine], keys[:, :, place], values[:, :, place], block, call.scores
                    )
                    if mine.start in outs:
                        found = merged(outs[mine.start], sums[mine.start], *found)
                    outs[mine.start], sums[mine.start] = found
        own = [mine for mine, _ in _placed(call.runs(call.axis.rank))]
        like = query.new_empty((), dtype=torch.float32)
        out = outs.joined(own, like, (*query.shape[:-1], value.shape[-1]), 0.0)
        lse = sums.joined(own, like, query.shape[:-1], float("-inf"))
        if sinks is not None:  # adds to the softmax denominator only
            nothing = torch.zeros_like(out)
            out, lse = merged(out, lse, nothing, sinks.float()[None, :, None].expand_as(lse))
        ctx.save_for_backward(query, key, value, sinks, lse)
        ctx.call = call
        return out.to(query.dtype), lse

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(
        ctx: Any, gradient: Tensor, d_lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None]:
        query, key, value, sinks, lse = ctx.saved_tensors
        call: RingCall = ctx.call
        gradient = gradient.contiguous()
        d_queries, back = _Pieces(), _Returns(key, value, call)
        for chunk, keys, values in _Chunks(key, value, call):
            d_keys, d_values = _Pieces(), _Pieces()
            for mine, queries, place, positions in call.pairs(chunk):
                block = call.mask.block(queries, positions)
                if block.visibility is Visibility.NONE:
                    continue
                found = attend_backward(
                    gradient[:, :, mine],
                    query[:, :, mine],
                    keys[:, :, place],
                    values[:, :, place],
                    lse[:, :, mine],
                    d_lse[:, :, mine],
                    block,
                    call.scores,
                )
                for pieces, at, part in zip(
                    (d_queries, d_keys, d_values), (mine, place, place), found, strict=True
                ):
                    pieces.add(at.start, part)
            places = [place for place, _ in _placed(call.runs(chunk))]
            gradients = None
            if d_keys or call.sees(call.axis.rank, chunk):  # the owner expects zeros, too, if `sees`
                gradients = (
                    d_keys.joined(places, keys, keys.shape),
                    d_values.joined(places, keys, values.shape),
                )
            back.give(chunk, gradients)
        d_key, d_value = back.sum()
        own = [mine for mine, _ in _placed(call.runs(call.axis.rank))]
        d_query = d_queries.joined(own, query, query.shape)
        d_sinks = None
        if sinks is not None:
            share = (sinks.float()[None, :, None] - lse).exp()
            d_sinks = (share * d_lse).sum((0, 2)).to(sinks.dtype)
        return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), d_sinks, None


class _Pieces(dict[int, Tensor]):
    """Maps the start of each run of a chunk to its tensor, [B, H, run, ...]."""

    def add(self, start: int, part: Tensor) -> None:
        """Accumulate into a piece, in fp32."""
        self[start] = self[start].float().add_(part) if start in self else part

    def joined(self, runs: Sequence[slice], like: Tensor, shape: Sequence[int], fill: float = 0.0) -> Tensor:
        """Return [B, H, chunk, ...], with `fill` for runs without a piece. A single run is not copied."""
        if len(runs) == 1 and runs[0].start in self:
            return self[runs[0].start]
        whole = like.new_full(tuple(shape), fill, dtype=torch.float32)
        for run in runs:
            if run.start in self:
                whole[:, :, run] = self[run.start]
        return whole


class _Chunks:
    """Iterates over (chunk, keys, values): this rank's chunk, then the others in step order. For a chunk that
    this rank does not see, its own keys and values are placeholders: every block of that chunk is skipped."""

    def __init__(self, key: Tensor, value: Tensor, call: RingCall) -> None:
        self.key, self.value, self.call = key, value, call

    @cached_property
    def own(self) -> Tensor:
        """Return this rank's keys and values, packed for sending."""
        return _packed(self.key, self.value)

    def __iter__(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        axis = self.call.axis
        coming = self._start(1)
        yield axis.rank, self.key, self.value
        for step in range(1, axis.degree):
            arrived, coming = coming, self._start(step + 1)
            assert arrived is not None, "no exchange was started"
            pending, buffer = arrived
            pending.wait()
            there = (self.key, self.value) if buffer is None else _unpacked(buffer, self.key, self.value)
            yield ((axis.rank - step) % axis.degree, *there)

    def _start(self, step: int) -> tuple[Pending, Tensor | None] | None:
        """Start the exchange of a step."""
        axis = self.call.axis
        if step >= axis.degree:
            return None
        source, to = (axis.rank - step) % axis.degree, (axis.rank + step) % axis.degree
        own = self.own if self.call.sees(to, axis.rank) else None
        seen = self.call.sees(axis.rank, source)
        buffer = self.key.new_empty(self.key.numel() + self.value.numel()) if seen else None
        return _exchange(own, to, buffer, source, axis, self.key), buffer


class _Returns:
    """Sends the gradients of keys and values back to their owners, in the steps in which these arrived."""

    def __init__(self, key: Tensor, value: Tensor, call: RingCall) -> None:
        self.key, self.value, self.call = key, value, call
        self._sent: tuple[Pending, Tensor | None] | None = None
        self._total: tuple[Tensor, Tensor] | None = None

    def give(self, chunk: int, gradients: tuple[Tensor, Tensor] | None) -> None:
        """Send the gradients of the next chunk to its owner; None: this rank did not see the chunk."""
        axis = self.call.axis
        if chunk == axis.rank:
            self._total = gradients
            return
        step = (axis.rank - chunk) % axis.degree
        source = (axis.rank + step) % axis.degree
        packed = gradients and _packed(gradients[0].float(), gradients[1].float())
        like = self.key.new_empty(0, dtype=torch.float32)
        seen = self.call.sees(source, axis.rank)
        buffer = like.new_empty(self.key.numel() + self.value.numel()) if seen else None
        sent = _exchange(packed, chunk, buffer, source, axis, like)
        self._add()
        self._sent = sent, buffer

    def sum(self) -> tuple[Tensor, Tensor]:
        """Return the gradients of this rank's keys and values, summed over all ranks."""
        self._add()
        d_key, d_value = self._total or self._zeros()
        return d_key, d_value

    def _add(self) -> None:
        """Wait for the last exchange and add the gradients that it received."""
        if self._sent is None:
            return
        (pending, buffer), self._sent = self._sent, None
        pending.wait()
        if buffer is None:
            return
        d_key, d_value = self._total or self._zeros()
        self._total = d_key.float(), d_value.float()
        for sum_of, part in zip(self._total, _unpacked(buffer, self.key, self.value), strict=True):
            sum_of += part

    def _zeros(self) -> tuple[Tensor, Tensor]:
        key, value = (torch.zeros_like(like, dtype=torch.float32) for like in (self.key, self.value))
        return key, value


def _exchange(
    out: Tensor | None, to: int, into: Tensor | None, source: int, axis: Axis, like: Tensor
) -> Pending:
    """Send one flat tensor and receive another; None: no message. `like` has their dtype and device."""
    outgoing, incoming = ([like.new_empty(0)] * axis.degree for _ in range(2))
    if out is not None:
        outgoing[to] = out
    if into is not None:
        incoming[source] = into
    return all_to_all(outgoing, incoming, axis, TAG)


def _placed(runs: tuple[range, ...]) -> Iterator[tuple[slice, range]]:
    start = 0
    for run in runs:
        yield slice(start, start + len(run)), run
        start += len(run)


def _packed(key: Tensor, value: Tensor) -> Tensor:
    return torch.cat([key.reshape(-1), value.reshape(-1)])


def _unpacked(packed: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = packed.split([key.numel(), value.numel()])
    return keys.view(key.shape), values.view(value.shape)
