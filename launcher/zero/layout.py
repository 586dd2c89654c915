"""Which parameter goes into which unit and which flat buffer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from launcher.comm import Axis
from launcher.errors import LauncherError
from launcher.offload.placement import Placement, Placements
from launcher.tensor.split import Split
from launcher.zero.policy import ZeroPolicy
from launcher.zero.slot import NO_OTHERS, ParamSlot


@dataclass
class PlannedBuffer:
    """Slots that share a flat buffer."""

    sharded: bool
    dtype: torch.dtype
    slots: list[ParamSlot] = field(default_factory=list)

    @property
    def padded_numel(self) -> int:
        """Elements, but for what alignment adds."""
        return sum(slot.padded_numel for slot in self.slots)

    def bytes_of_parameters(self, degree: int) -> int:
        """Of a shard that can rest somewhere."""
        return self.padded_numel // degree * self.dtype.itemsize if self.sharded else 0

    def bytes_of_step(self, degree: int, policy: ZeroPolicy, states: int) -> int:
        """Of what the optimizer works with: gradient, master weights that are no parameters, fp32 states."""
        if not self.slots[0].leaf.requires_grad:
            return 0
        gradient = policy.grad_dtype.itemsize if policy.shard_grads else 0
        master = 4 if policy.fp32_master and self.dtype != torch.float32 else 0
        return self.padded_numel // degree * (gradient + master + 4 * states)


@dataclass
class PlannedUnit:
    """A unit before its buffers exist."""

    name: str
    module: nn.Module
    groups: list[PlannedBuffer] = field(default_factory=list)


def assign_units(
    model: nn.Module,
    blocks: list[tuple[str, nn.Module]],
    policy: ZeroPolicy,
    splits: Mapping[str, Split],
    holders: Mapping[str, Axis],
    cut: int = 2**63,
) -> list[PlannedUnit]:
    """Give every parameter of `model` to one unit: the block it lies in, else the root unit, which comes last.

    A parameter that several units show (tied weights) belongs to the root unit, whose parameters are there from the
    start of the forward to the end of the backward. So do the small ones that persist under ZeRO-3: together
    they are one collective instead of one a block. What several pipeline stages hold has flat buffers of its own,
    so that these are alike on all of them.

    Args:
        cut: elements of a flat buffer, of one parameter at least, or as many as there are.
    """
    units = [PlannedUnit(name, module) for name, module in blocks]
    root = PlannedUnit("root", model)
    unit_of_module = {inner: unit for unit in units for inner in unit.module.modules()}
    buffers: dict[tuple[object, ...], PlannedBuffer] = {}
    persisted = 0
    for slot in _slots(model, splits, holders):
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
        key = (unit.name, dtype, slot.leaf.requires_grad, sharded, None if alone else id(slot.holders))
        if key not in buffers or buffers[key].padded_numel + slot.padded_numel > cut:
            buffers[key] = PlannedBuffer(sharded, dtype)
            unit.groups.append(buffers[key])
        buffers[key].slots.append(slot)
    return [unit for unit in units if unit.groups] + [root]


def choose_placements(
    units: list[PlannedUnit], placements: Placements, policy: ZeroPolicy, degree: int
) -> Iterator[tuple[Placement, Placement]]:
    """For each buffer in its order: where its parameters rest, and where the optimizer's tensors rest. Reserves the
    bytes
    that they need there.

    Args:
        degree: ranks that shards are dealt out to.

    Raises:
        OffloadError: there is not so much room.
    """
    groups = [group for unit in units for group in unit.groups]
    params = [group.bytes_of_parameters(degree) for group in groups]
    stepped = [group.bytes_of_step(degree, policy, placements.states) for group in groups]
    chosen = list(zip(placements.of_parameters(params), placements.of_optimizer(stepped), strict=True))
    sizes = zip(chosen, params, stepped, strict=True)
    placements.reserve([pair for (one, other), p, s in sizes for pair in ((one, p), (other, s))])
    return iter(chosen)


def _slots(model: nn.Module, splits: Mapping[str, Split], holders: Mapping[str, Axis]) -> list[ParamSlot]:
    """One slot for each parameter, in the order of named_parameters(), with every module that shows it."""
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    names: dict[nn.Parameter, str] = {}
    for prefix, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(parameter, []).append((module, attribute))
                names.setdefault(parameter, f"{prefix}.{attribute}" if prefix else attribute)
    return [_slot(names[p], p, where, splits, holders) for p, where in owners.items()]


def _slot(
    name: str,
    parameter: nn.Parameter,
    owners: list[tuple[nn.Module, str]],
    splits: Mapping[str, Split],
    holders: Mapping[str, Axis],
) -> ParamSlot:
    split = splits.get(name) or Split.whole(parameter.shape)
    if parameter.shape != split.local_shape or split.padded_numel < split.numel:
        raise LauncherError(
            f"{name} is {tuple(parameter.shape)}, and its split says {tuple(split.local_shape)} "
            f"with room for {split.padded_numel} elements",
            where="zero.apply(splits=...)",
            fix="split the parameters of the model before ZeRO takes them, and name them as named_parameters() does",
        )
    return ParamSlot(name, split, parameter, owners, holders=holders.get(name, NO_OTHERS))
