"""Gradients of one flat buffer: collected from the leaves, reduced, and kept in the owned range."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from launcher.comm import Pending, all_reduce, reduce_scatter
from launcher.models.gradients import put_gradient, seen_gradient
from launcher.offload.offloaded import OffloadedTensor
from launcher.offload.placement import Placement
from launcher.offload.tier import memory
from launcher.zero.flat import ALIGN, FlatBuffer
from launcher.zero.gradient_state import (
    HOLDS_VALUES,
    SUM_OVER_RANKS,
    GradientInspector,
    GradientState,
    SecondHop,
)
from launcher.zero.norm import SquaredRange, repeated_ranges, sum_of_squares
from launcher.zero.slot import ParamSlot


class FlatGradient:
    """The gradient of a trainable flat buffer.

    With `shard_grads` the full gradient exists only from the end of a unit's backward to the end of its
    reduce-scatter, and the sum is kept in `owned`. Without it the full gradient persists, the leaves' `.grad`
    are views of it (so later microbatches accumulate in place), and it is reduced once, at the accumulation
    boundary.

    A sharded gradient is stored with the optimizer state (`offload/placement.py`). On a tier it is in memory
    only until `rest`, and is loaded again for the next microbatch and for the step.

    Attributes:
        state: what is kept of this step's gradient.
        sharded: see above.
        shows: the kept gradient is the leaves' `.grad`, also between backwards.
        is_offloaded: it is not always in memory.
        discarded: reduced gradients were discarded on this rank.
        shown: parameters whose leaf's `.grad` is a view of the kept gradient.
        scatter: the reduction, if it is not an all-reduce.
        inspector, second_hop: features of this gradient; None if off.
    """

    def __init__(self, flat: FlatBuffer) -> None:
        policy = flat.policy
        self.flat, self.policy = flat, policy
        elsewhere = flat.optim_placement != Placement(flat.pool.device)
        self.sharded = policy.shard_grads and (flat.axis.degree > 1 or elsewhere)
        self.is_offloaded = self.sharded and flat.optim_placement.tier is not None
        self._scatters = flat.shards_optim and policy.reduce_scatter
        special = flat.dtype != policy.param_dtype
        self._dtype = torch.float32 if special else policy.grad_dtype
        self._wire_dtype = policy.comm_dtype or (flat.dtype if special else None)
        self._predivide = policy.predivide or flat.axes.divisor
        self.shows = not self.sharded and not flat.sharded and self._dtype == flat.dtype
        self.state = GradientState.EMPTY
        self.discarded = False
        self.scatter: Callable[..., Pending] = reduce_scatter
        self.inspector: GradientInspector | None = None
        self.second_hop: SecondHop | None = None
        self._full: Tensor | None = None
        self._shard: OffloadedTensor | None = None
        self._landing: Tensor | None = None  # reduction result on the device, if the shard is on the host
        self._squares: Tensor | None = None  # of the offloaded shard
        self._touched = False  # the shard was accessed since it was offloaded
        self._arrival: torch.cuda.Event | None = None  # end of the copy from the device into the shard
        self.shown: set[ParamSlot] = set()

    @property
    def owned(self) -> Tensor:
        """Return the gradient that this rank's optimizer uses [owned range]; zeros before any backward."""
        if not self.sharded:
            return self.full_buffer()[self.flat.owned]
        self._squares, self._touched = None, True
        self._wait_for_arrival()
        if not self.is_offloaded:
            return self._resident
        shard = self._shard_buffer()
        return shard.load() if self.kept or shard.held_bytes else shard.allocate().zero_()

    @property
    def share(self) -> Tensor:
        """Return this rank's slice of the reduced gradient [numel / degree]; all slices form the whole."""
        return self.owned if self.flat.shards_optim else self.full_buffer()[self.flat.shard_span]

    @property
    def kept(self) -> bool:
        """Return whether gradients of earlier microbatches of this step are kept."""
        return self.state in HOLDS_VALUES

    @property
    def reduced(self) -> bool:
        """Return whether the unsharded gradient is the sum over ranks (in this rank's owned range)."""
        return self.state in SUM_OVER_RANKS

    @property
    def adds_in_place(self) -> bool:
        """Return whether autograd accumulates in place into the kept gradient."""
        return self.shows and self.kept

    @property
    def held_bytes(self) -> int:
        full = 0 if self._full is None else self._full.numel() * self._full.element_size()
        return full + (0 if self._shard is None else self._shard.held_bytes)

    def _wait_for_arrival(self) -> None:
        """Wait for the copy of the gradient to the host, which overlaps with the backward."""
        if self._arrival is not None:
            self._arrival.synchronize()
            self._arrival = None

    @cached_property
    def _resident(self) -> Tensor:
        return self._shard_buffer().load()

    def _shard_buffer(self) -> OffloadedTensor:
        if self._shard is None:
            flat = self.flat
            size, key = flat.owned.stop - flat.owned.start, f"{flat.name}/gradient"
            self._shard = flat.placements.resting(key, size, self._dtype, flat.optim_placement)
        return self._shard

    def fetch(self) -> None:
        """Start loading the owned gradient."""
        if self.is_offloaded and self.kept:
            self._shard_buffer().fetch()

    def squares(self) -> Tensor:
        """Return the sum of squares of this rank's share as an fp64 scalar, cached while the share is
        offloaded. Elements that h tp ranks hold are weighted by 1/h; a parameter that several pipeline stages
        hold is counted by the first of them."""
        return self._sum_squares() if self._squares is None else self._squares

    def _sum_squares(self) -> Tensor:
        if self.flat.slots[0].holders.rank > 0:
            return torch.zeros((), dtype=torch.float64)
        return sum_of_squares(self.share, self._repeated)

    @cached_property
    def _repeated(self) -> list[SquaredRange]:
        return repeated_ranges(self.flat)

    def rest(self, *, changed: bool = True, final: bool = False) -> None:
        """Release the owned gradient, if it is offloaded.

        Args:
            changed: it was modified: write it back first.
            final: no more gradients are added in this step.
        """
        if not (self.is_offloaded and self._touched):
            return
        self._wait_for_arrival()
        squares = self._sum_squares() if changed and final and self.policy.compute_norm else None
        shard = self._shard_buffer()
        shard.write_back() if changed and self.kept else shard.discard()
        self._squares, self._touched = squares, False

    def spend(self, squares: Tensor | None) -> None:
        """Discard the values that the optimizer has used, and keep the sum of their squares."""
        self._wait_for_arrival()
        self._shard_buffer().discard()
        self.state = GradientState.SPENT if self.reduced else GradientState.EMPTY
        self._touched, self._squares = False, squares

    def full_buffer(self) -> Tensor:
        """Return the unsharded gradient [numel], allocating it on first use."""
        if self._full is None:
            self._full = memory(self.flat.numel, self._dtype, self.flat.pool.device).zero_()
        return self._full

    # ---- one microbatch ---------------------------------------------------------------------

    def place(self, slot: ParamSlot) -> Tensor | None:
        """Return the tensor in which microbatches without reduction can accumulate a gradient outside
        autograd: the leaf's `.grad`, or the region that becomes it. None: the gradient must go through
        autograd, for the hooks on the leaf or the hook that frees its unit."""
        if self.flat.sharded or slot.leaf._backward_hooks:
            return None
        if (grad := seen_gradient(slot.leaf)) is not None:
            return grad
        return self.full_buffer()[slot.span].view(slot.shape) if self.shows else None

    def collect(self) -> Tensor:
        """Move the leaves' gradients into a full buffer [numel]: a new one if sharded, else the persistent
        one."""
        if self.sharded:
            full = self.flat.pool.take(self.flat.numel, self._wire_dtype or self.flat.dtype)
            self._move(full, accumulate=False)
            for slot in self.flat.slots:
                put_gradient(slot.leaf, None)
            return full
        full = self.full_buffer()
        self._move(full, accumulate=self.kept)
        self._to_collected()
        # A view as .grad lets autograd add the next microbatch in place; another dtype cannot be a view.
        self.shown = {slot for slot in self.flat.slots if self.shows and slot.used}
        for slot in self.flat.slots:
            put_gradient(slot.leaf, full[slot.span].view(slot.shape) if slot in self.shown else None)
        return full

    def _to_collected(self) -> None:
        if self.state is GradientState.EMPTY:
            self.state = GradientState.LOCAL
        elif self.state is GradientState.SPENT:
            self.state = GradientState.REDUCED

    def sync_with_leaves(self) -> None:
        """Collect the user's edits of the leaves' `.grad` since the last backward, if `.grad` is what is
        kept."""
        if self.adds_in_place:
            self.collect()

    @property
    def closed(self) -> bool:
        """Return whether a gradient that arrives now, without `reopen` first, would not be counted exactly
        once."""
        counts_once = self.flat.axis.degree == 1 and self._predivide == 1
        return self.state is GradientState.REDUCED and not counts_once

    def reopen(self) -> None:
        """Prepare a reduced gradient for another backward: keep only this rank's share of the sum, so that
        the next reduction counts it once."""
        if not self.reduced:
            return
        self.sync_with_leaves()
        if self.state is GradientState.SPENT:
            self.state = GradientState.EMPTY
            return
        full, share = self.full_buffer(), self.flat.shard_span
        full[: share.start].zero_()
        full[share.stop :].zero_()
        full[share].mul_(self._predivide)
        self.state = GradientState.REOPENED if self.closed else GradientState.LOCAL

    def _move(self, full: Tensor, *, accumulate: bool) -> None:
        into: list[Tensor] = []
        grads: list[Tensor] = []
        for slot in self.flat.slots:
            grad = seen_gradient(slot.leaf)
            region = full[slot.span]
            if slot in self.shown and (grad is None or grad.data_ptr() != region.data_ptr()):
                region.zero_()  # the user discarded or replaced the view
                slot.used = False
                self.discarded |= self.reduced and grad is None
            slot.used |= grad is not None
            if grad is None:
                if not accumulate:
                    region.zero_()
            elif grad.data_ptr() != region.data_ptr():
                into.append(region.view(slot.shape))
                grads.append(grad)
        if not accumulate:
            _zero_padding(full, self.flat.slots)
        if not into:
            return
        if accumulate:
            torch._foreach_add_(into, grads)
        else:
            torch._foreach_copy_(into, grads)

    def to_wire(self, full: Tensor) -> Tensor:
        """Return the collected gradient, predivided and in the dtype of the collective: `full` itself, or a
        copy that `done` returns to the pool."""
        if self.inspector is not None:
            self.inspector.look(full)
        dtype = self._wire_dtype or full.dtype
        if full.dtype == dtype or self.flat.axis.degree == 1:
            return full if self._predivide == 1 else full.div_(self._predivide)
        wire = self.flat.pool.take(full.numel(), dtype)
        return wire.copy_(full) if self._predivide == 1 else torch.div(full, self._predivide, out=wire)

    def buckets(self) -> list[slice]:
        """Return the element ranges of the shard (all-reduced: of the whole buffer), one per collective."""
        flat = self.flat
        ways = flat.axis.degree if self._scatters else 1
        size = max(ALIGN, self.policy.reduce_bucket_size // ways)
        return [slice(at, min(at + size, flat.numel // ways)) for at in range(0, flat.numel // ways, size)]

    def reduce(self, wire: Tensor, bucket: slice) -> Pending:
        """Start the reduction of one bucket of a collected gradient."""
        if not self.sharded:
            self.state = GradientState.REDUCED
        flat, tag = self.flat, f"{self.flat.name}/backward"
        if not self._scatters:
            return all_reduce(wire[bucket], flat.axis, tag)
        if self._lands:
            if self._landing is None:
                self._landing = flat.pool.take(flat.numel // flat.axis.degree, self._dtype)
            return self.scatter(wire, self._landing, flat.axis, tag, within=bucket, accumulate=False)
        accumulate = self.sharded and self.kept
        return self.scatter(wire, self.owned, flat.axis, tag, within=bucket, accumulate=accumulate)

    @property
    def _lands(self) -> bool:
        """Return whether reductions end in device memory while the shard is in host memory."""
        return self.sharded and self.flat.optim_placement.device != self.flat.pool.device

    def done(self, wire: Tensor) -> None:
        """Copy the result out of `wire` after all its buckets are reduced, and return the buffer to the
        pool."""
        if wire is self._full:
            return
        mine = self._landing if self._scatters else wire[self.flat.owned]
        if mine is not None:
            owned = self.owned
            if self.sharded and self.kept:
                owned.add_(mine.to(owned.device))
            elif self._lands:
                from launcher.models.host_copies import send_to_host

                self._arrival = send_to_host(owned, mine)
            else:
                owned.copy_(mine)
        landing, self._landing = self._landing, None
        if landing is not None:
            self.flat.pool.give(landing, self._arrival)
        self.state = GradientState.SCATTERED if self.sharded else GradientState.REDUCED
        self.flat.pool.give(wire, self._arrival if landing is None else None)

    def zero(self) -> None:
        """Clear the gradient at the end of a step. Buffers are kept, and overwritten in the next step."""
        self.state, self.discarded = GradientState.EMPTY, False
        self._wait_for_arrival()
        if self.is_offloaded:
            self._shard_buffer().discard()
            self._squares, self._touched = None, False
        for feature in (self.inspector, self.second_hop):
            if feature is not None:
                feature.clear()
        self.shown.clear()
        for slot in self.flat.slots:
            slot.used = False
            put_gradient(slot.leaf, None)


def _zero_padding(full: Tensor, slots: list[ParamSlot]) -> None:
    """Zero the padding, which is part of norms and sums."""
    for slot, following in zip(slots, [*slots[1:], None], strict=True):
        end = slot.offset + slot.numel
        upto = following.offset if following is not None else full.numel()
        if end < upto:
            full[end:upto].zero_()
