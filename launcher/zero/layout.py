"""The assignment of parameters to units and flat buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from launcher.comm import Axis
from launcher.errors import LauncherError
from launcher.offload.placement import Placement, Placements
from launcher.tensor.split import Split
from launcher.zero.axes import ShardAxes
from launcher.zero.policy import ZeroPolicy
from launcher.zero.pool import BufferPool
from launcher.zero.slot import NO_OTHERS, ParamSlot


@dataclass(frozen=True)
class ShardLayout:
    """The layout shared by the flat buffers of a model: how they are sharded, and where their memory comes
    from.

    Args:
        policy: what is sharded, in which dtypes.
        axes: the data-parallel axis, and the axes inside it along which state is sharded.
        pool: buffers for gathered parameters and reduced gradients, on the compute device.
        placements: where shards are stored.
        expert_axes: like `axes`, for experts that are distributed over ranks.
    """

    policy: ZeroPolicy
    axes: ShardAxes
    pool: BufferPool
    placements: Placements
    expert_axes: ShardAxes | None = None

    @classmethod
    def of(
        cls,
        policy: ZeroPolicy,
        axes: ShardAxes,
        device: torch.device,
        placements: Placements | None = None,
        expert_axes: ShardAxes | None = None,
    ) -> ShardLayout:
        """Return the layout for a device. Without `placements` everything is kept in device memory."""
        placements = placements or Placements(device)
        pool = BufferPool(device, placements.buffers.idle if placements.one_memory else None)
        return cls(policy, axes, pool, placements, expert_axes)

    def axes_of(self, *, expert: bool) -> ShardAxes:
        """Return the axes for expert parameters, or for all others."""
        return self.expert_axes if expert and self.expert_axes is not None else self.axes

    @property
    def device(self) -> torch.device:
        return self.pool.device


@dataclass(frozen=True)
class LocalModel:
    """How this rank's model differs from the whole model, if that is split over ranks.

    Args:
        splits: name -> the elements of the logical parameter on this rank; parameters without an entry are
            not split.
        tp: the axis along which they are split. Each tp rank runs ZeRO separately, over its own elements.
        ep: the axis along which experts are split instead.
        experts: the names of the expert parameters.
        pp: the axis along which the model is split into stages.
        holders: name -> the stages that hold a parameter, if there are several.
        elsewhere: parameters that only other stages hold -> their location, as text for error messages.
    """

    splits: Mapping[str, Split] = field(default_factory=dict)
    tp: Axis = field(default_factory=lambda: Axis("tp"))
    ep: Axis = field(default_factory=lambda: Axis("ep"))
    experts: frozenset[str] = frozenset()
    pp: Axis = field(default_factory=lambda: Axis("pp"))
    holders: Mapping[str, Axis] = field(default_factory=dict)
    elsewhere: Mapping[Tensor, str] = field(default_factory=dict)


@dataclass(frozen=True)
class BufferPlacement:
    """The placement of a flat buffer.

    Args:
        params: the placement of its parameters.
        optim: the placement of the optimizer's tensors: master weights, sharded gradient, optimizer state.
    """

    params: Placement
    optim: Placement


@dataclass
class BufferSpec:
    """The specification of a flat buffer that is not created yet.

    Args:
        sharded: whether the parameters are sharded: as in the policy, unless these persist.
        dtype: the compute dtype of the module.
        expert: the parameters belong to experts, of which other ranks hold different ones.
        float8: the dtype in which shards are sent, if their layers cast them to float8.
        slots: the parameters in the buffer; their leaves may still be on meta.
    """

    sharded: bool
    dtype: torch.dtype
    expert: bool = False
    float8: torch.dtype | None = None
    slots: list[ParamSlot] = field(default_factory=list)

    @property
    def padded_numel(self) -> int:
        """Return the number of elements, without alignment padding."""
        return sum(slot.padded_numel for slot in self.slots)

    def bytes_of_parameters(self, degree: int) -> int:
        """Return the bytes of a parameter shard, which may be offloaded; 0 if not sharded."""
        return self.padded_numel // degree * self.dtype.itemsize if self.sharded else 0

    def bytes_of_step(self, degree: int, policy: ZeroPolicy, states: int) -> int:
        """Return the bytes of the optimizer's tensors: gradient, separate master weights, optimizer state."""
        if not self.slots[0].leaf.requires_grad:
            return 0
        gradient = policy.grad_dtype.itemsize if policy.shard_grads else 0
        master = 4 if policy.fp32_master and self.dtype != torch.float32 else 0
        return self.padded_numel // degree * (gradient + master + 4 * states)


@dataclass
class UnitSpec:
    """A unit whose buffers are not created yet."""

    name: str
    module: nn.Module
    groups: list[BufferSpec] = field(default_factory=list)


def assign_units(
    model: nn.Module,
    blocks: list[tuple[str, nn.Module]],
    layout: ShardLayout,
    parts: LocalModel,
) -> list[UnitSpec]:
    """Assign every parameter of `model` to one unit: the block that contains it, else the root unit, which
    comes last.

    A parameter that several units use (tied weights) belongs to the root unit, whose parameters are available
    from the start of the forward to the end of the backward. Small parameters that persist under ZeRO-3 also
    belong to the root unit, where one collective serves all of them instead of one per block. Parameters that
    several pipeline stages hold get separate flat buffers, so that these are identical on all of the stages.
    Expert parameters get separate flat buffers, too, because they are sharded over other ranks, and so do weights
    that are gathered in float8.
    """
    policy = layout.policy
    units = [UnitSpec(name, module) for name, module in blocks]
    root = UnitSpec("root", model)
    unit_of_module = {inner: unit for unit in units for inner in unit.module.modules()}
    buffers: dict[tuple[object, ...], BufferSpec] = {}
    persisted = 0
    for slot in _slots(model, parts):
        owners = {unit_of_module.get(owner, root).name for owner, _ in slot.owners}
        unit = unit_of_module.get(slot.owners[0][0], root) if len(owners) == 1 else root
        sharded = policy.shard_params
        alone = slot.holders.degree == 1
        if sharded and alone and slot.padded_numel < policy.persistence_threshold:
            persisted += slot.padded_numel
            if persisted <= policy.model_persistence_threshold:
                sharded, unit = False, root
        dtype = slot.leaf.dtype
        if dtype.is_floating_point:
            dtype = policy.special_dtypes.get(slot.name, policy.param_dtype)
        expert = slot.name in parts.experts
        float8 = policy.float8.get(slot.name) if sharded else None
        key = (
            unit.name,
            dtype,
            slot.leaf.requires_grad,
            sharded,
            expert,
            float8,
            None if alone else id(slot.holders),
        )
        # a buffer is as large as its placement allows, but holds at least one parameter
        cut = layout.placements.cut * layout.axes_of(expert=expert).shard.degree
        if key not in buffers or buffers[key].padded_numel + slot.padded_numel > cut:
            buffers[key] = BufferSpec(sharded, dtype, expert, float8)
            unit.groups.append(buffers[key])
        buffers[key].slots.append(slot)
    return [unit for unit in units if unit.groups] + [root]


def choose_placements(units: list[UnitSpec], layout: ShardLayout) -> Iterator[BufferPlacement]:
    """Yield the placement of each buffer, in order, after reserving the bytes of all of them.

    Raises:
        OffloadError: there is not enough space.
    """
    placements = layout.placements
    groups = [group for unit in units for group in unit.groups]
    degrees = [layout.axes_of(expert=group.expert).shard.degree for group in groups]
    params = [group.bytes_of_parameters(degree) for group, degree in zip(groups, degrees, strict=True)]
    stepped = [
        group.bytes_of_step(degree, layout.policy, placements.states)
        for group, degree in zip(groups, degrees, strict=True)
    ]
    chosen = [
        BufferPlacement(*pair)
        for pair in zip(placements.of_parameters(params), placements.of_optimizer(stepped), strict=True)
    ]
    sizes = zip(chosen, params, stepped, strict=True)
    placements.reserve([pair for one, p, s in sizes for pair in ((one.params, p), (one.optim, s))])
    return iter(chosen)


def _slots(model: nn.Module, parts: LocalModel) -> list[ParamSlot]:
    """Return one slot per parameter, in the order of named_parameters(), with all modules that own it."""
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    names: dict[nn.Parameter, str] = {}
    for prefix, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(parameter, []).append((module, attribute))
                names.setdefault(parameter, f"{prefix}.{attribute}" if prefix else attribute)
    return [_slot(names[p], p, where, parts) for p, where in owners.items()]


def _slot(
    name: str,
    parameter: nn.Parameter,
    owners: list[tuple[nn.Module, str]],
    parts: LocalModel,
) -> ParamSlot:
    split = parts.splits.get(name) or Split.whole(parameter.shape)
    if parameter.shape != split.local_shape or split.padded_numel < split.numel:
        raise LauncherError(
            f"{name} has shape {tuple(parameter.shape)}, but its split expects "
            f"{tuple(split.local_shape)} with {split.padded_numel} padded elements",
            where="zero.apply(splits=...)",
            fix="split the parameters of the model before ZeRO shards them, and use the names of "
            "named_parameters()",
        )
    axis = parts.ep if name in parts.experts else parts.tp
    return ParamSlot(name, split, axis, parameter, owners, holders=parts.holders.get(name, NO_OTHERS))
