"""Flat buffers: how parameters are laid out, sharded and installed in the module.

[Note: the words of ZeRO]

unit          a transformer block, the embedding, the head, or the rest of the model (the root unit): the
              parameters that are gathered and reduced together
flat buffer   the parameters of one unit with the same dtype and `requires_grad`, concatenated and padded to a
              multiple of the degree of the shard axis
slot          the position of one parameter in a flat buffer: its elements on this tp rank, zero-padded to the
              largest size on any tp rank
shard         slice r of a flat buffer, held by rank r of the axis
full          the whole flat buffer: permanent if parameters are not sharded, else only while unsharded
leaf          the nn.Parameter that autograd sees; its data is a view of `full`
handle        the ShardedParameter that replaces the leaf in the module while the buffer is sharded
master        the weights that the optimizer steps: the shard itself in fp32, an fp32 copy in 16-bit training (the
              shard itself if `fp32_master` is false)
owned         the range of the flat buffer whose optimizer state this rank holds: its slice, or all of it (stage 0)
offloaded     a shard, master or gradient that is in memory only while it is in use (`offload/offloaded.py`):
              reading it loads it, and `rest` releases it

[Note: buffers and streams]

On a GPU the module computes on the current stream, and collectives run on their own streams. A collective
starts after the work that is already queued on the current stream, and `Pending.wait` makes the current
stream wait for it; the CPU does not block. The current stream therefore orders every use of a pool buffer:
`reshard` may return a buffer while kernels that read it are still queued, and the next gather into that
buffer starts after them. No events are needed, but nothing may use a buffer before `wait_for_unshard` or
after `reshard`.

Copies from and to the host have one stream per direction, separate from the current one. A shard in host
memory is copied and gathered on the copy stream, and `Pending.wait` also waits for that stream. A gradient
buffer is returned to the pool while it is still being copied to the host; the next user of the buffer waits
for the copy (`BufferCache.take`). Streams do not order the reuse of host memory that a tier hands out again:
if the shard is on a tier, the CPU waits for the copy before the memory is returned (`_gather`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from launcher.comm import Pending, all_gather, broadcast
from launcher.models.gradients import put_data
from launcher.offload.offloaded import OffloadedSlice, OffloadedTensor
from launcher.offload.placement import Placement
from launcher.offload.tier import memory
from launcher.zero.layout import BufferPlacement, BufferSpec, ShardLayout
from launcher.zero.sharded_parameter import ShardedParameter
from launcher.zero.sharded_state import GatherFeature, PackedShard, ShardedState, UnshardInFlight
from launcher.zero.slot import ParamReader, ParamSlice, ParamSlot

EXACT = "gather"  # the phase of gathers for users, checkpoints and edits, which need exact values
SlotView = tuple[ParamSlot, Tensor]  # a parameter, and the part of it that a rank owns
ALIGN = 16  # elements: every slot and every shard starts on a cache line in fp32


class FlatBuffer:
    """The parameters with one dtype and one `requires_grad`, as one flat buffer on the shard axis.

    Args:
        name: used in messages and profiler ranges.
        spec: the parameters it holds.
        layout: how the buffers of the model are sharded.
        placement: where the buffer is stored; default: device memory.

    Attributes:
        state: the sharding state of the parameters.
        full: all parameters [numel], while they are unsharded.
        gather_features: tried in order before the plain all-gather.
    """

    def __init__(
        self, name: str, spec: BufferSpec, layout: ShardLayout, placement: BufferPlacement | None = None
    ) -> None:
        self.name, self.slots, self.dtype = name, spec.slots, spec.dtype
        self.policy, self.axes = layout.policy, layout.axes_of(expert=spec.expert)
        self.pool, self.placements = layout.pool, layout.placements
        on_device = Placement(layout.device)
        placement = placement or BufferPlacement(on_device, on_device)
        self.params_placement, self.optim_placement = placement.params, placement.optim
        self.axis, self.shards_optim = self.axes.shard, self.policy.shard_optim
        self.float8 = spec.float8
        self.trainable = self.slots[0].leaf.requires_grad
        # With one rank the shard is the whole buffer: nothing to gather or free, unless it is off the device.
        self.sharded = spec.sharded and (self.axis.degree > 1 or self.params_placement != on_device)
        self.state = ShardedState.SHARDED if self.sharded else ShardedState.REPLICATED
        self.numel = self._lay_out()
        self.shard_span = self.axis.span(self.numel)
        self.owned = self.shard_span if self.shards_optim else slice(0, self.numel)
        """The range of the flat buffer that this rank's optimizer steps."""
        self.full: Tensor | None = None
        self.is_exact = True
        """Whether `full` has the values of the shards; not if they were rounded to be sent."""
        self.gather_features: list[GatherFeature] = []
        self.packed: PackedShard | None = None
        self._in_flight: UnshardInFlight | None = None
        self.empty = torch.empty(0, dtype=self.dtype, device=layout.device)
        self._allocate()

    def _lay_out(self) -> int:
        end = 0
        for slot in self.slots:
            slot.place(self, end)
            end += -(-slot.padded_numel // ALIGN) * ALIGN
        unit = self.axis.degree * ALIGN
        return -(-end // unit) * unit

    def _allocate(self) -> None:
        device = self.pool.device
        if self.sharded:
            size = self.numel // self.axis.degree
            shard = self.placements.resting(
                f"{self.name}/parameters", size, self.dtype, self.params_placement
            )
        else:
            self.full = memory(self.numel, self.dtype, device).zero_()
            shard = self.placements.staying(self.full[self.shard_span])
        wide = torch.float32 if self.policy.fp32_master else self.dtype
        master = shard if self.sharded else self.placements.staying(self._owned_params)
        params_on = self.params_placement.device if self.sharded else device
        self.steps_elsewhere = self.optim_placement.device != params_on
        self.own_master = self.trainable and (self.dtype != wide or self.steps_elsewhere)
        if self.own_master:
            size = self.owned.stop - self.owned.start
            master = self.placements.resting(f"{self.name}/master", size, wide, self.optim_placement)
        self.keep(shard, master)

    def keep(self, shard: OffloadedTensor, master: OffloadedTensor) -> None:
        """Replace the shard and the master weights."""
        self._shard, self._master = shard, master
        self.master_dtype = master.dtype
        self.shard_is_offloaded = shard.is_offloaded
        self.is_offloaded = shard.is_offloaded or master.is_offloaded
        """True if the shard or the master weights are kept off the device."""
        self._stays = None if self.is_offloaded else (shard.load(), master.load())

    # ---- shard and master weights -----------------------------------------------------------

    @property
    def shard(self) -> Tensor:
        """Return this rank's shard [numel / degree], loading it if it is offloaded."""
        return self._shard.load() if self._stays is None else self._stays[0]

    @property
    def master(self) -> Tensor:
        """Return the master weights [owned range], loading them if they are offloaded."""
        return self._master.load() if self._stays is None else self._stays[1]

    def fetch(self, *, master: bool = False) -> None:
        """Start loading the shard, or the master weights."""
        (self._master if master else self._shard).fetch()

    def rest(self, *, changed: bool = False) -> None:
        """Release the memory of an offloaded shard and offloaded master weights.

        Args:
            changed: write them back first.
        """
        if self._stays is not None:
            return
        for one in (self._shard, self._master):
            one.write_back() if changed else one.discard()

    @property
    def _owned_params(self) -> Tensor:
        """Return the owned range of parameters that are not sharded."""
        assert self.full is not None
        return self.full[self.owned]

    def values(self) -> OffloadedTensor:
        """Return the master weights for reading; quantised shards are dequantised until `publish`."""
        return self._master if self.packed is None else self.packed.unpack()

    @property
    def held_bytes(self) -> int:
        """Return the bytes of parameters that this rank holds between steps, without master weights."""
        if not self.sharded:
            return 0 if self.full is None else self.full.nbytes
        return self._shard.held_bytes + sum(feature.held_bytes for feature in self.gather_features)

    @property
    def master_bytes(self) -> int:
        """Return the bytes of master weights that are not also the parameters."""
        return self._master.held_bytes if self.own_master else 0

    # ---- parameters -------------------------------------------------------------------------

    def new_params(self) -> tuple[slice, Tensor]:
        """Return the range of the flat buffer that this rank keeps, and a zeroed tensor to copy it into."""
        if self.full is not None:
            return slice(0, self.numel), self.full
        return self.shard_span, self._shard.allocate().zero_()

    def new_master(self) -> Tensor:
        """Return a zeroed tensor for the master weights [owned range]."""
        return self._master.allocate().zero_()

    def copy_in(self, read: ParamReader, span: slice, out: Tensor) -> None:
        """Copy the parameters' values in a range of the flat buffer into `out`."""
        for slot, start, stop in self.overlaps(span):
            at = slot.offset + start - span.start
            out[at : at + stop - start].copy_(read(slot.name, start, stop))

    def make_leaf(self, slot: ParamSlot) -> None:
        """Create a slot's leaf, and its handle if the buffer is sharded."""
        old = slot.leaf
        if old.is_meta:  # otherwise keep the user's parameter as the leaf: other references to it stay valid
            # Not of self.empty: leaves of one tensor share its version counter, so a write to one of them would look
            # to autograd like a write to all.
            slot.leaf = nn.Parameter(torch.empty_like(self.empty), requires_grad=old.requires_grad)
            slot.leaf.__dict__.update(old.__dict__)
        if self.sharded:
            slot.handle = ShardedParameter(slot)

    def overlaps(self, span: slice) -> Iterator[tuple[ParamSlot, int, int]]:
        """Yield the slots that intersect `span` of the flat buffer, and the elements of each inside it."""
        for slot in self.slots:
            start, stop = max(slot.offset, span.start), min(slot.offset + slot.numel, span.stop)
            if start < stop:
                yield slot, start - slot.offset, stop - slot.offset

    def owned_views(self, of: Tensor) -> Iterator[SlotView]:
        """Yield each parameter's part of a buffer over the owned range."""
        first = self.owned.start
        for slot, start, stop in self.overlaps(self.owned):
            yield slot, of[slot.offset + start - first : slot.offset + stop - first]

    def slices(self, of: Tensor | None = None, span: slice | None = None) -> list[ParamSlice]:
        """Return the slices of the parameters that this rank owns.

        Args:
            of: a buffer over the owned range; default: the master weights, which are not loaded by this call.
            span: restrict the slices to this range of the flat buffer; default: the owned range.
        """
        whole = self.values() if of is None else self.placements.staying(of)
        first = self.owned.start
        return [
            ParamSlice(
                slot.name,
                slot.split,
                start,
                stop,
                OffloadedSlice(whole, slice(slot.offset + start - first, slot.offset + stop - first)),
            )
            for slot, start, stop in self.overlaps(span or self.owned)
        ]

    # ---- unshard and reshard ----------------------------------------------------------------

    @property
    def is_unsharded(self) -> bool:
        """Return whether all parameters are available."""
        return self.full is not None

    def unshard(self, phase: str) -> None:
        """Start the all-gather into a pool buffer; does nothing unless the state is SHARDED, or exact values are
        requested and the gathered ones are not."""
        if self.state is not ShardedState.SHARDED:
            if phase == EXACT and not self.is_exact:
                self.wait_for_unshard()
                assert self.full is not None
                self.is_exact = True
                self._all_gather(self.full, f"{self.name}/{phase}").wait()
            return
        buffer, tag = self.pool.take(self.numel, self.dtype), f"{self.name}/{phase}"
        self._in_flight = UnshardInFlight(buffer, self._gather(buffer, phase, tag))
        self.state = ShardedState.UNSHARDING

    def _gather(self, buffer: Tensor, phase: str, tag: str) -> Pending:
        for feature in self.gather_features:
            if (pending := feature.gather(buffer, phase, tag)) is not None:
                self.is_exact = phase == EXACT or not feature.rounds
                return pending
        self.is_exact = True
        return self._all_gather(buffer, tag)

    def _all_gather(self, buffer: Tensor, tag: str) -> Pending:
        # see [Note: buffers and streams]
        shard = self.shard
        lane = None
        if shard.device != buffer.device:
            from launcher.models.host_copies import lane_of

            lane = lane_of("from host", buffer.device)
        with nullcontext() if lane is None else lane.beside():
            buffer[self.shard_span].copy_(shard, non_blocking=not self.shard_is_offloaded)
            if self.shard_is_offloaded:
                self._shard.discard()
            pending = all_gather(buffer, self.axis, tag)
        return pending if lane is None else Pending([pending, lane.ticket()])

    def wait_for_unshard(self) -> None:
        """Wait for the all-gather and install the parameters in the module."""
        if self._in_flight is None:
            return
        (self.full, pending), self._in_flight = self._in_flight, None
        pending.wait()
        for feature in self.gather_features:
            feature.on_unsharded(self.full)
        self.pool.occupants[self.full.untyped_storage()._cdata] = self
        self.state = ShardedState.UNSHARDED
        self.attach()

    def reshard(self) -> None:
        """Free the gathered parameters and install the handles in the module again."""
        self.wait_for_unshard()
        if self.state is not ShardedState.UNSHARDED or self.full is None:
            return
        self.detach()
        full, self.full = self.full, None
        self.state = ShardedState.SHARDED
        del self.pool.occupants[full.untyped_storage()._cdata]
        self.pool.give(full)

    def attach(self) -> None:
        """Install the parameters in `full` in the module."""
        assert self.full is not None
        for slot in self.slots:
            if self.sharded and self.trainable and slot.leaf.requires_grad != slot.handle.requires_grad:
                # user code holds the handle, and froze or unfroze it
                slot.leaf.requires_grad_(slot.handle.requires_grad)
            put_data(slot.leaf, self.full[slot.span].view(slot.shape))
            for module, attribute in slot.owners:
                module._parameters[attribute] = slot.leaf

    def detach(self) -> None:
        """Install the handles in the module."""
        for slot in self.slots:
            put_data(slot.leaf, self.empty)
            for module, attribute in slot.owners:
                module._parameters[attribute] = slot.handle  # type: ignore[assignment]

    def show_shape(self, slot: ParamSlot) -> None:
        """Give a sharded leaf its full shape, without memory."""
        if not self.is_unsharded:
            put_data(slot.leaf, self.empty.new_zeros(()).expand(slot.shape))

    def hide_shape(self, slot: ParamSlot) -> None:
        """Undo `show_shape`."""
        if not self.is_unsharded:
            put_data(slot.leaf, self.empty)

    # ---- after the optimizer ----------------------------------------------------------------

    @property
    def params_beside_master(self) -> Tensor | None:
        """Return the parameters [owned range], or None unless they are separate from the master weights and
        always in memory."""
        if not self.own_master or self.shard_is_offloaded:
            return None
        return self.shard if self.sharded else self._owned_params

    def publish(self, *, written: bool = False) -> list[Pending]:
        """Start copying the updated master weights into the parameters of every rank; return the pending
        collectives.

        Args:
            written: the optimizer has already written `params_beside_master`.
        """
        for feature in self.gather_features:
            feature.on_change()
        if self.packed is not None:
            self.packed.pack()
            return []
        if self.own_master and not written:
            params = self._shard.allocate() if self.sharded else self._owned_params
            params.copy_(self.master)
        self.rest(changed=True)
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


def tiles(parts: list[SlotView], size: int) -> Iterator[list[SlotView]]:
    """Group slices of parameters into lists of at most `size` elements; larger slices stay alone."""
    tile: list[SlotView] = []
    elements = 0
    for slot, part in parts:
        if tile and elements + part.numel() > size:
            yield tile
            tile, elements = [], 0
        tile.append((slot, part))
        elements += part.numel()
    if tile:
        yield tile
