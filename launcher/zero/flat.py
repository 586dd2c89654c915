"""Flat buffers: how parameters are laid out, sharded and shown to the module.

Terms of this package:

unit          a transformer block, the embedding, the head, or the rest of the model (the root unit): what is gathered
              and reduced together
flat buffer   the parameters of one unit with one dtype and one `requires_grad`, laid end to end, padded so that the
              degree of the shard axis divides it
slot          the place of one parameter in a flat buffer: its elements on this tp rank, and room for the most on any;
              the rest is padding, which stays zero
shard         slice r of a flat buffer, held by rank r of the axis
full          the whole flat buffer: always there when parameters are not sharded, else only while gathered
leaf          the nn.Parameter that autograd sees; its data is a view of `full`
handle        the ShardedParameter that stands in the module while the buffer is sharded
master        the weights that the optimizer steps: the shard itself in fp32, an fp32 copy in 16-bit training (the
              shard itself where `fp32_master` is false)
owned         the range of the flat buffer whose optimizer state this rank holds: its slice, or all of it (stage 0)
packed        the shard of frozen parameters in 8-bit blocks, in place of `shard` and `master`
resting       shard, master or gradient that is in memory only while somebody works with it (`offload/offloaded.py`):
              who asks for it brings it in, and `rest` lets it go
second        with hpZ: slice r of what was gathered last, r being the rank on a smaller axis that later gathers use
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from launcher.comm import Pending, all_gather, broadcast, dequantize, quantize, quantized_all_gather
from launcher.offload.offloaded import OffloadedSlice, OffloadedTensor
from launcher.offload.placement import Placement, Placements
from launcher.offload.tier import memory
from launcher.zero.axes import ShardAxes
from launcher.zero.policy import ZeroPolicy
from launcher.zero.pool import BufferPool
from launcher.zero.sharded_parameter import ShardedParameter
from launcher.zero.slot import ParamReader, ParamSlice, ParamSlot

EXACT = "gather"  # the phase of a gather for people, checkpoints and edits: nothing is quantised
BITS = 8  # of quantised parameters
ALIGN = 16  # elements: every slot and every shard starts on a cache line in fp32


class FlatBuffer:
    """Parameters with one dtype and one `requires_grad`, as one flat buffer on the shard axis.

    Args:
        name: for messages and profiler ranges.
        slots: the parameters; their leaves may still be on meta.
        dtype: what the module computes in.
        sharded: whether parameters are sharded (the policy's answer, unless these persist).
        placements: where things rest; default: in the memory of the device.
        params_placement, optim_placement: where these parameters do, and what the optimizer works with.
    """

    def __init__(
        self,
        name: str,
        slots: list[ParamSlot],
        dtype: torch.dtype,
        *,
        sharded: bool,
        policy: ZeroPolicy,
        axes: ShardAxes,
        pool: BufferPool,
        placements: Placements | None = None,
        params_placement: Placement | None = None,
        optim_placement: Placement | None = None,
    ) -> None:
        self.name, self.slots, self.dtype, self.pool = name, slots, dtype, pool
        self.placements = placements or Placements(pool.device)
        self.params_placement = params_placement or Placement(pool.device)
        self.optim_placement = optim_placement or Placement(pool.device)
        self.axes, self.axis = axes, axes.shard
        self.trainable = slots[0].leaf.requires_grad
        # With one rank the slice is the whole: there is nothing to gather and nothing to free, if it rests there.
        self.sharded = sharded and (self.axis.degree > 1 or self.params_placement != Placement(pool.device))
        self.policy, self.shards_optim = policy, policy.shard_optim
        self.numel = self._lay_out()
        self.full: Tensor | None = None
        self.second: Tensor | None = None
        self.packed: Tensor | None = None
        self._gathering: tuple[Tensor, Pending] | None = None
        self._fills_second = False  # the gather under way brings the second shard up to date
        self._second_is_new = False  # the second shard has the parameters of this step
        self._empty = torch.empty(0, dtype=dtype, device=pool.device)
        self._allocate()

    def _lay_out(self) -> int:
        end = 0
        for slot in self.slots:
            slot.flat, slot.offset = self, end
            end += -(-slot.padded_numel // ALIGN) * ALIGN
        unit = self.axis.degree * ALIGN
        return -(-end // unit) * unit

    def _allocate(self) -> None:
        device = self.pool.device
        if self.sharded:
            size = self.numel // self.axis.degree
            self._shard = self.placements.resting(
                f"{self.name}/parameters", size, self.dtype, self.params_placement
            )
            if self.axes.secondary is not None:
                size = self.numel // self.axes.secondary.degree
                self.second = memory(size, self.dtype, device).zero_()
        else:
            self.full = memory(self.numel, self.dtype, device).zero_()
            self._shard = self.placements.staying(self.full[self.shard_span])
        wide = torch.float32 if self.policy.fp32_master else self.dtype
        self._master = self._shard if self.sharded else self.placements.staying(self._owned_params)
        params_on = self.params_placement.device if self.sharded else device
        self.own_master = self.trainable and (self.dtype != wide or self.optim_placement.device != params_on)
        if self.own_master:
            size = self.owned.stop - self.owned.start
            self._master = self.placements.resting(f"{self.name}/master", size, wide, self.optim_placement)

    @property
    def shard(self) -> Tensor:
        """[numel / degree] of this rank."""
        return self._shard.load()

    @property
    def master(self) -> Tensor:
        """Over the owned range."""
        return self._master.load()

    @property
    def master_dtype(self) -> torch.dtype:
        return self._master.dtype

    @property
    def is_offloaded(self) -> bool:
        """Something of it is not always in memory."""
        return self._shard.is_offloaded or self._master.is_offloaded

    def fetch(self, *, master: bool = False) -> None:
        """Start bringing the shard in, or the master weights."""
        (self._master if master else self._shard).fetch()

    def rest(self, *, changed: bool = False) -> None:
        """Let go of what rests elsewhere.

        Args:
            changed: write it first.
        """
        for resting in (self._shard, self._master):
            resting.write_back() if changed else resting.discard()

    @property
    def shard_span(self) -> slice:
        return self.axis.span(self.numel)

    @property
    def owned(self) -> slice:
        """The range of the flat buffer that this rank's optimizer steps."""
        return self.shard_span if self.shards_optim else slice(0, self.numel)

    @property
    def _owned_params(self) -> Tensor:
        """Of parameters that are not sharded."""
        assert self.full is not None
        return self.full[self.owned]

    @property
    def is_unsharded(self) -> bool:
        return self.full is not None

    @property
    def held_bytes(self) -> int:
        """Bytes of parameters that this rank holds between steps, master weights apart."""
        held = [self.full] if not self.sharded else [self.second, self.packed]
        shard = self._shard.held_bytes if self.sharded else 0
        return shard + sum(t.numel() * t.element_size() for t in held if t is not None)

    @property
    def master_bytes(self) -> int:
        """Bytes of master weights that are no parameters."""
        return self._master.held_bytes if self.own_master else 0

    # ---- values in and out ------------------------------------------------------------------

    def fill(self, read: ParamReader, *, from_rank_zero: bool) -> None:
        """Take the parameters' values, in whatever dtype `read` has them, and show the parameters to the module.

        Args:
            read: gives the values; only what this rank keeps is asked for.
            from_rank_zero: broadcast rank 0's values, for models that each rank built on its own.
        """
        if from_rank_zero and self.axes.dp.degree > 1:
            read = self._broadcast_first(read)
        keep = slice(0, self.numel) if self.full is not None else self.shard_span
        params = self.full if self.full is not None else self._shard.allocate().zero_()
        self._copy(read, keep, params)
        if self.own_master:
            self._copy(read, self.owned, self._master.allocate().zero_())
        if self.policy.quantized_frozen and self.sharded and not self.trainable:
            self._pack(self.shard)
        self.rest(changed=True)
        for slot in self.slots:
            self._make_leaf(slot)
        if self.full is not None:
            self._attach()
        else:
            self._detach()

    def _copy(self, read: ParamReader, span: slice, out: Tensor) -> None:
        for slot, start, stop in self.overlaps(span):
            at = slot.offset + start - span.start
            out[at : at + stop - start].copy_(read(slot.name, start, stop))

    def _broadcast_first(self, read: ParamReader) -> ParamReader:
        values = {
            slot.name: read(slot.name, 0, slot.numel).to(self.pool.device, copy=True) for slot in self.slots
        }
        for value in values.values():
            broadcast(value, self.axes.dp, f"{self.name}/init").wait()
        return lambda name, start, stop: values[name][start:stop]

    def _pack(self, values: Tensor) -> None:
        self.packed = quantize(values, BITS)
        self._shard = self._master = self.placements.staying(self._empty)

    def values(self) -> OffloadedTensor:
        """The master weights, to be read: unpacked until they are published."""
        if self.packed is not None and not self._master.numel:
            whole = self._empty.new_empty(self.numel // self.axis.degree)
            self._master = self.placements.staying(dequantize(self.packed, whole, BITS))
        return self._master

    def _make_leaf(self, slot: ParamSlot) -> None:
        old = slot.leaf
        if (
            old.is_meta
        ):  # elsewhere the user's own nn.Parameter stays the leaf: other references to it stay good
            slot.leaf = nn.Parameter(self._empty, requires_grad=old.requires_grad)
            slot.leaf.__dict__.update(old.__dict__)
        if self.sharded:
            slot.handle = ShardedParameter(slot)

    def overlaps(self, span: slice) -> Iterator[tuple[ParamSlot, int, int]]:
        """Slots that meet `span` of the flat buffer, with the element range of the parameter that lies in it."""
        for slot in self.slots:
            start, stop = max(slot.offset, span.start), min(slot.offset + slot.numel, span.stop)
            if start < stop:
                yield slot, start - slot.offset, stop - slot.offset

    def slices(self, of: Tensor | None = None, span: slice | None = None) -> list[ParamSlice]:
        """What this rank owns of each parameter.

        Args:
            of: a buffer over the owned range; default: the master weights, which are not brought in for this.
            span: only what lies in this range of the flat buffer; default: all that is owned.
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

    # ---- gather and free --------------------------------------------------------------------

    def unshard(self, phase: str) -> None:
        """Begin the all-gather into a buffer of the pool; nothing happens when gathered or under way."""
        if self.full is not None or self._gathering is not None:
            return
        buffer, tag = self.pool.take(self.numel, self.dtype), f"{self.name}/{phase}"
        quantized = self.policy.quantized_weights and phase != EXACT
        second = self.axes.secondary if self._second_is_new else None
        # What the second shard holds may have been quantised, and then it is not what is asked for.
        if second is not None and (quantized or not self.policy.quantized_weights):
            assert self.second is not None
            buffer[second.span(self.numel)].copy_(self.second)
            self._gathering = buffer, all_gather(buffer, second, tag)
            return
        self._fills_second = self.axes.secondary is not None and phase != EXACT
        if quantized or self.packed is not None:
            packed = quantize(self.shard, BITS) if self.packed is None else self.packed
            self._gathering = buffer, quantized_all_gather(buffer, packed, self.axis, tag, bits=BITS)
            return
        buffer[self.shard_span].copy_(self.shard, non_blocking=not self._shard.is_offloaded)
        self._shard.discard()
        self._gathering = buffer, all_gather(buffer, self.axis, tag)

    def wait_for_unshard(self) -> None:
        """Finish the all-gather and show the parameters to the module."""
        if self._gathering is None:
            return
        (self.full, pending), self._gathering = self._gathering, None
        pending.wait()
        if self._fills_second and self.second is not None and self.axes.secondary is not None:
            self.second.copy_(self.full[self.axes.secondary.span(self.numel)])
            self._fills_second, self._second_is_new = False, True
        self.pool.occupants[self.full.untyped_storage()._cdata] = self
        self._attach()

    def reshard(self) -> None:
        """Give the gathered parameters up: the module shows handles again."""
        self.wait_for_unshard()
        if not self.sharded or self.full is None:
            return
        self._detach()
        full, self.full = self.full, None
        del self.pool.occupants[full.untyped_storage()._cdata]
        self.pool.give(full)

    def show(self, values: Tensor) -> None:
        """Let the module compute with these values [numel] in place of what it has; not for sharded parameters."""
        self.full = values
        self._attach()

    def _attach(self) -> None:
        assert self.full is not None
        for slot in self.slots:
            if self.sharded and self.trainable and slot.leaf.requires_grad != slot.handle.requires_grad:
                slot.leaf.requires_grad_(slot.handle.requires_grad)  # the script has it in hand, and froze it
            slot.leaf.data = self.full[slot.span].view(slot.shape)
            slot.show(slot.leaf)

    def _detach(self) -> None:
        for slot in self.slots:
            slot.leaf.data = self._empty
            slot.show(slot.handle)

    # ---- after the optimizer ----------------------------------------------------------------

    @property
    def params_beside_master(self) -> Tensor | None:
        """[owned range]: the parameters, where they are other memory than the master weights, and always there."""
        if not self.own_master or self._shard.is_offloaded:
            return None
        return self.shard if self.sharded else self._owned_params

    def publish(self, *, written: bool = False) -> list[Pending]:
        """Bring the stepped master weights into the parameters of every rank; started, to be waited for.

        Args:
            written: the optimizer has written `params_beside_master`.
        """
        self._second_is_new = False
        if self.packed is not None:
            self._pack(self.values().load())
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

    def take_edits(self, edited: Iterable[ParamSlot]) -> None:
        """Put what differs from the master weights into them; not for sharded parameters."""
        assert self.full is not None
        master, owned = self.master, self.owned
        for slot in edited:
            start, stop = max(slot.span.start, owned.start), min(slot.span.stop, owned.stop)
            if start < stop:
                kept, now = (
                    master[start - owned.start : stop - owned.start],
                    self.full[start:stop].to(master.device),
                )
                kept.copy_(torch.where(kept.to(now.dtype) == now, kept, now.to(kept.dtype)))
        self.rest(changed=True)

    def take_back(self, edited: ParamSlot, source: int) -> None:
        """Make a gathered parameter of rank `source` everybody's: parameter, shard and master weights."""
        assert self.full is not None
        full, self._second_is_new = self.full, False
        broadcast(full[edited.span], self.axes.dp, f"{self.name}/edit", source=source).wait()
        if self.packed is not None:
            self.values()
        parts = [(self.owned, self.master)] + [(self.shard_span, self.shard)] * (self.packed is None)
        for span, kept in parts:
            start, stop = max(edited.span.start, span.start), min(edited.span.stop, span.stop)
            if start < stop:
                kept[start - span.start : stop - span.start].copy_(full[start:stop])
        if self.packed is not None:
            self._pack(self.master)
        self.rest(changed=True)
