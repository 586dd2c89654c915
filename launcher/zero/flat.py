"""Flat buffers: how parameters are laid out, sharded and shown to the module.

Words used in this room, and nowhere with another meaning:

unit          a transformer block, the embedding, the head, or the rest of the model (the root unit): what is gathered
              and reduced together
flat buffer   the parameters of one unit with one dtype and one `requires_grad`, laid end to end, padded so that the
              degree of the shard axis divides it
slot          the place of one parameter in a flat buffer
shard         slice r of a flat buffer, held by rank r of the axis
full          the whole flat buffer: always there when parameters are not sharded, else only while gathered
leaf          the nn.Parameter that autograd sees; its data is a view of `full`
handle        the ShardedParameter that stands in the module while the buffer is sharded
master        the weights that the optimizer steps: the shard itself in fp32, an fp32 copy in 16-bit training (the
              shard itself where `fp32_master` is false)
owned         the range of the flat buffer whose optimizer state this rank holds: its slice, or all of it (stage 0)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor, nn

from launcher.comm import Axis, Pending, all_gather, broadcast
from launcher.zero.policy import ZeroPolicy
from launcher.zero.pool import BufferPool
from launcher.zero.sharded_parameter import ShardedParameter

ALIGN = 16  # elements: every slot and every shard starts on a cache line in fp32

# reads elements [start, stop) of a parameter, flat: (name, start, stop) -> [stop - start]
Reader = Callable[[str, int, int], Tensor]


@dataclass(eq=False)
class Slot:
    """One parameter of a flat buffer.

    Args:
        name: the name that named_parameters() gives, the first one for tied parameters.
        shape: logical shape.
        leaf: what autograd differentiates.
        owners: every (module, attribute) that shows this parameter; more than one for tied parameters.
        offset: first element in the flat buffer.
        used: a gradient arrived since the last step.
    """

    name: str
    shape: torch.Size
    leaf: nn.Parameter
    owners: list[tuple[nn.Module, str]]
    offset: int = 0
    used: bool = False
    flat: FlatBuffer = field(init=False, repr=False)
    handle: ShardedParameter = field(init=False, repr=False)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def span(self) -> slice:
        return slice(self.offset, self.offset + self.numel)

    def show(self, parameter: Tensor) -> None:
        """Put `parameter` (the leaf or the handle) into every module that owns this slot."""
        for module, attribute in self.owners:
            module._parameters[attribute] = parameter  # type: ignore[assignment]


@dataclass(frozen=True)
class ParamSlice:
    """The part of one parameter that this rank owns.

    Args:
        name, shape: of the logical parameter.
        start, stop: flat element range of it.
        data: [stop - start], master weights: fp32 (the parameter's own dtype when frozen, or without fp32_master); a
            view, writable.
    """

    name: str
    shape: torch.Size
    start: int
    stop: int
    data: Tensor


class FlatBuffer:
    """Parameters with one dtype and one `requires_grad`, as one flat buffer on one axis.

    Args:
        name: for messages and profiler ranges.
        slots: the parameters; their leaves may still be on meta.
        dtype: what the module computes in.
        sharded: whether parameters are sharded (the policy's answer, unless these persist).
    """

    def __init__(
        self,
        name: str,
        slots: list[Slot],
        dtype: torch.dtype,
        *,
        sharded: bool,
        policy: ZeroPolicy,
        axis: Axis,
        pool: BufferPool,
    ) -> None:
        self.name, self.slots, self.dtype, self.axis, self.pool = name, slots, dtype, axis, pool
        self.trainable = slots[0].leaf.requires_grad
        # With one rank the slice is the whole: there is nothing to gather and nothing to free.
        self.sharded = sharded and axis.degree > 1
        self.policy, self.shards_optim = policy, policy.shard_optim
        self.numel = self._lay_out()
        self.full: Tensor | None = None
        self._gathering: tuple[Tensor, Pending] | None = None
        self._empty = torch.empty(0, dtype=dtype, device=pool.device)
        self._allocate()

    def _lay_out(self) -> int:
        end = 0
        for slot in self.slots:
            slot.flat, slot.offset = self, end
            end += -(-slot.numel // ALIGN) * ALIGN
        unit = self.axis.degree * ALIGN
        return -(-end // unit) * unit

    def _allocate(self) -> None:
        device = self.pool.device
        if self.sharded:
            self.shard = torch.zeros(self.numel // self.axis.degree, dtype=self.dtype, device=device)
        else:
            self.full = torch.zeros(self.numel, dtype=self.dtype, device=device)
            self.shard = self.full[self.shard_span]
        self.master = self._owned_params
        if self.trainable and self.dtype != torch.float32 and self.policy.fp32_master:
            self.master = torch.zeros(self.owned.stop - self.owned.start, device=device)

    @property
    def shard_span(self) -> slice:
        return self.axis.span(self.numel)

    @property
    def owned(self) -> slice:
        """The range of the flat buffer that this rank's optimizer steps."""
        return self.shard_span if self.shards_optim else slice(0, self.numel)

    @property
    def _owned_params(self) -> Tensor:
        if self.sharded or self.full is None:
            return self.shard
        return self.full[self.owned]

    @property
    def gathered(self) -> bool:
        return self.full is not None

    # ---- values in and out ------------------------------------------------------------------

    def fill(self, read: Reader, *, from_rank_zero: bool) -> None:
        """Take the parameters' values, in whatever dtype `read` has them, and show the parameters to the module.

        Args:
            read: gives the values; only what this rank keeps is asked for.
            from_rank_zero: broadcast rank 0's values, for models that each rank built on its own.
        """
        if from_rank_zero and self.axis.degree > 1:
            read = self._broadcast_first(read)
        keep = slice(0, self.numel) if self.full is not None else self.shard_span
        params = self.full if self.full is not None else self.shard
        self._copy(read, keep, params)
        if self.master is not None and self.master.dtype != self.dtype:
            self._copy(read, self.owned, self.master)
        for slot in self.slots:
            self._make_leaf(slot)
        if self.full is not None:
            self._attach()
        else:
            self._detach()

    def _copy(self, read: Reader, span: slice, out: Tensor) -> None:
        for slot, start, stop in self.overlaps(span):
            at = slot.offset + start - span.start
            out[at : at + stop - start].copy_(read(slot.name, start, stop))

    def _broadcast_first(self, read: Reader) -> Reader:
        values = {
            slot.name: read(slot.name, 0, slot.numel).to(self.pool.device, copy=True) for slot in self.slots
        }
        for value in values.values():
            broadcast(value, self.axis, f"{self.name}/init").wait()
        return lambda name, start, stop: values[name][start:stop]

    def _make_leaf(self, slot: Slot) -> None:
        old = slot.leaf
        if (
            old.is_meta
        ):  # elsewhere the user's own nn.Parameter stays the leaf: other references to it stay good
            slot.leaf = nn.Parameter(self._empty, requires_grad=old.requires_grad)
            slot.leaf.__dict__.update(old.__dict__)
        if self.sharded:
            slot.handle = ShardedParameter(slot)

    def overlaps(self, span: slice) -> Iterator[tuple[Slot, int, int]]:
        """Slots that meet `span` of the flat buffer, with the element range of the parameter that lies in it."""
        for slot in self.slots:
            start, stop = max(slot.offset, span.start), min(slot.offset + slot.numel, span.stop)
            if start < stop:
                yield slot, start - slot.offset, stop - slot.offset

    def slices(self, of: Tensor | None = None, span: slice | None = None) -> list[ParamSlice]:
        """What this rank owns of each parameter.

        Args:
            of: a buffer over the owned range; default: the master weights.
            span: only what lies in this range of the flat buffer; default: all that is owned.
        """
        of = self.master if of is None else of
        first = self.owned.start
        return [
            ParamSlice(
                slot.name,
                slot.shape,
                start,
                stop,
                of[slot.offset + start - first : slot.offset + stop - first],
            )
            for slot, start, stop in self.overlaps(span or self.owned)
        ]

    # ---- gather and free --------------------------------------------------------------------

    def gather_start(self, phase: str) -> None:
        """Begin the all-gather into a buffer of the pool; nothing happens when gathered or under way."""
        if self.full is not None or self._gathering is not None:
            return
        buffer = self.pool.take(self.numel, self.dtype)
        buffer[self.shard_span].copy_(self.shard)
        self._gathering = buffer, all_gather(buffer, self.axis, f"{self.name}/{phase}")

    def gather_wait(self) -> None:
        """Finish the all-gather and show the parameters to the module."""
        if self._gathering is None:
            return
        (self.full, pending), self._gathering = self._gathering, None
        pending.wait()
        self.pool.occupants[self.full.untyped_storage()._cdata] = self
        self._attach()

    def free(self) -> None:
        """Give the gathered parameters up: the module shows handles again."""
        self.gather_wait()
        if not self.sharded or self.full is None:
            return
        self._detach()
        full, self.full = self.full, None
        del self.pool.occupants[full.untyped_storage()._cdata]
        self.pool.give(full)

    def _attach(self) -> None:
        assert self.full is not None
        for slot in self.slots:
            slot.leaf.data = self.full[slot.span].view(slot.shape)
            slot.show(slot.leaf)

    def _detach(self) -> None:
        for slot in self.slots:
            slot.leaf.data = self._empty
            slot.show(slot.handle)

    # ---- after the optimizer ----------------------------------------------------------------

    def publish(self) -> list[Pending]:
        """Bring the stepped master weights into the parameters of every rank; started, to be waited for."""
        if self.master.dtype != self.dtype:
            self._owned_params.copy_(self.master)
        if self.sharded or not self.shards_optim:
            return []
        assert self.full is not None
        tag = f"{self.name}/publish"
        if not self.policy.allgather_partitions:
            slices = self.full.chunk(self.axis.degree)
            return [broadcast(part, self.axis, tag, source=rank) for rank, part in enumerate(slices)]
        size = max(ALIGN, self.policy.allgather_bucket_size // self.axis.degree)
        parts = [slice(at, at + size) for at in range(0, self.shard.numel(), size)]
        return [all_gather(self.full, self.axis, tag, within=part) for part in parts]

    def take_back(self, edited: Slot, source: int) -> None:
        """Make a gathered parameter of rank `source` everybody's: parameter, shard and master weights."""
        assert self.full is not None
        full = self.full
        broadcast(full[edited.span], self.axis, f"{self.name}/edit", source=source).wait()
        for span, kept in ((self.shard_span, self.shard), (self.owned, self.master)):
            start, stop = max(edited.span.start, span.start), min(edited.span.stop, span.stop)
            if start < stop:
                kept[start - span.start : stop - span.start].copy_(full[start:stop])
