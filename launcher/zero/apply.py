"""`zero.apply`: moves the parameters of a model into flat buffers and shards them according to the policy."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from launcher.comm import broadcast
from launcher.monitor.memory import trim_malloc
from launcher.zero.features.attach import attach_features, attach_to_buffer, attach_to_gradient
from launcher.zero.features.leaf import Blocks, with_leaves
from launcher.zero.flat import FlatBuffer
from launcher.zero.gradients import FlatGradient
from launcher.zero.layout import LocalModel, ShardLayout, assign_units, choose_placements
from launcher.zero.model import ZeroModel
from launcher.zero.slot import ParamReader
from launcher.zero.source import MadeOnMeta, ModelValues, ParamSource
from launcher.zero.unit import Unit


def apply(
    module: nn.Module,
    blocks: Blocks,
    layout: ShardLayout,
    parts: LocalModel | None = None,
    source: ParamSource | None = None,
) -> ZeroModel:
    """Move the parameters of `module` into flat buffers.

    Args:
        module: any nn.Module with local parameters; they may be on meta if `source` creates their values.
        blocks: the modules that become units, as (name, module), unless leaf modules replace them; all other
            parameters form the root unit.
        layout: how the flat buffers are sharded and where they are stored.
        parts: how `module` differs from the whole model; default: it is the whole model.
        source: the initial values; default: the current values of the module, with those of rank 0 broadcast
            to all.
    """
    source, parts = source or ModelValues(), parts or LocalModel()
    units = []
    for unit in lay_out(module, blocks, layout, parts):
        for flat in unit.flats:
            with source.open(flat.slots) as read:
                fill(flat, read, from_rank_zero=isinstance(source, ModelValues))
        units.append(unit)
        if layout.placements.one_memory:
            trim_malloc()  # return the memory of the original values to the system
    if isinstance(source, MadeOnMeta):
        source.make_buffers(layout.device)
    _move_buffers(module, layout.device)
    zero = ZeroModel(module, units, layout, parts)
    attach_features(zero)
    return zero


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    for owner in module.modules():
        for key, buffer in owner._buffers.items():
            if buffer is not None and buffer.device != device:
                owner._buffers[key] = buffer.to(device)


def lay_out(
    module: nn.Module,
    blocks: Blocks,
    layout: ShardLayout,
    parts: LocalModel,
    buffer: type[FlatBuffer] = FlatBuffer,
    gradient: type[FlatGradient] = FlatGradient,
) -> Iterator[Unit]:
    """Yield the units of a model with their flat buffers; the root unit comes last.

    Args:
        buffer, gradient: the classes to instantiate.
    """
    modules = with_leaves(module, blocks) if layout.policy.shard_params else blocks
    planning = assign_units(module, modules, layout, parts)
    chosen = choose_placements(planning, layout)
    for planned in planning:
        flats = []
        for i, group in enumerate(planned.groups):
            name = planned.name if len(planned.groups) == 1 else f"{planned.name}.{i}"
            flats.append(buffer(name, group, layout, next(chosen)))
            attach_to_buffer(flats[-1])
        gradients = [gradient(flat) for flat in flats if flat.trainable]
        for one in gradients:
            attach_to_gradient(one)
        yield Unit(planned.name, planned.module, flats, gradients)


def fill(flat: FlatBuffer, read: ParamReader, *, from_rank_zero: bool) -> None:
    """Copy the values into a flat buffer, cast to its dtype, and install the parameters in the module.

    Args:
        read: reads the values; called only for the elements that this rank keeps.
        from_rank_zero: broadcast the values of rank 0, for models that each rank built on its own.
    """
    if from_rank_zero and flat.axes.dp.degree > 1:
        read = _broadcast_first(flat, read)
    keep, params = flat.new_params()
    flat.copy_in(read, keep, params)
    if flat.own_master:
        flat.copy_in(read, flat.owned, flat.new_master())
    if flat.packed is not None:
        flat.packed.pack()
    flat.rest(changed=True)
    for slot in flat.slots:
        flat.make_leaf(slot)
    if flat.full is not None:
        flat.attach()
    else:
        flat.detach()


def _broadcast_first(flat: FlatBuffer, read: ParamReader) -> ParamReader:
    values = {
        slot.name: read(slot.name, 0, slot.numel).to(flat.pool.device, copy=True) for slot in flat.slots
    }
    for value in values.values():
        broadcast(value, flat.axes.dp, f"{flat.name}/init").wait()
    return lambda name, start, stop: values[name][start:stop]
