"""DeepSpeed's parameter attributes that scripts read: `ds_id`, `ds_shape`, `ds_numel`, `ds_status`, ...

Libraries use `hasattr(parameter, "ds_id")` to detect ZeRO-3, so no parameter has it at lower stages. Every
parameter has `ds_status` and every module `ds_external_parameters`. `ds_status` is set on torch.Tensor
because a parameter that was saved for backward is returned as a plain tensor, with the gathered values.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from launcher.integrations.enumerations import ZeroParamStatus, ZeroParamType
from launcher.integrations.refused import NotHere, missing
from launcher.zero import ShardedParameter
from launcher.zero.features.leaf import FLAG

_NUMBERS = itertools.count()


def _status(parameter: Tensor) -> ZeroParamStatus:
    sharded = isinstance(parameter, ShardedParameter) and parameter.zero_holder.whole is None
    return ZeroParamStatus.NOT_AVAILABLE if sharded else ZeroParamStatus.AVAILABLE


def _number(parameter: ShardedParameter) -> int:
    """Return an id that is the same for all objects that represent one parameter."""
    holder: Any = parameter.zero_holder
    if not hasattr(holder, "ds_id"):
        holder.ds_id = next(_NUMBERS)
    return int(holder.ds_id)


def _summary(parameter: ShardedParameter) -> dict[str, Any]:
    return {
        "id": _number(parameter),
        "status": _status(parameter).name,
        "numel": parameter.numel(),
        "shape": tuple(parameter.shape),
        "requires_grad": parameter.requires_grad,
    }


SHARDED: dict[str, Callable[[ShardedParameter], Any]] = {
    "ds_id": _number,
    "ds_shape": lambda parameter: torch.Size(parameter.shape),
    "ds_numel": lambda parameter: parameter.numel(),
    "ds_persist": lambda parameter: False,
    "ds_param_type": lambda parameter: ZeroParamType.PARTITIONED,
}
ALL: dict[str, Callable[[Tensor], Any]] = {
    "ds_status": _status,
    "ds_active_sub_modules": lambda parameter: set(),
}
NOT_HERE = ("ds_tensor", "ds_secondary_tensor", "ds_process_group", "all_gather", "partition")


def _absent(name: str) -> Callable[[Any], Any]:
    def raise_it(parameter: Any) -> Any:
        what, how = missing(f"parameter.{name}", f"{name} of a sharded parameter")
        raise NotHere(what, **how)

    return raise_it


def mark_small(module: nn.Module) -> None:
    """Mark the small parameters that stay unsharded at stage 3, too: libraries that count parameters read the
    attributes of each."""
    for parameter in module.parameters():
        if not isinstance(parameter, ShardedParameter):
            small = {"ds_id": next(_NUMBERS), "ds_shape": parameter.shape, "ds_numel": parameter.numel()}
            small |= {"ds_persist": True, "partition_numel": parameter.numel}
            for name, value in small.items():
                setattr(parameter, name, value)


def _share(parameter: Tensor) -> int:
    """Return the average elements of a parameter per rank: whole units are sharded, not single parameters."""
    return -(-parameter.numel() // dist.get_world_size())


setattr(ShardedParameter, "partition_numel", _share)  # noqa: B010
for _name, _answer in SHARDED.items():
    setattr(ShardedParameter, _name, property(_answer))
for _name in NOT_HERE:
    setattr(ShardedParameter, _name, property(_absent(_name)))
setattr(ShardedParameter, "ds_summary", lambda self, *others, **more: _summary(self))  # noqa: B010
for _name, _of_all in ALL.items():
    setattr(torch.Tensor, _name, property(_of_all))
setattr(nn.Module, "ds_external_parameters", lambda module: ())  # noqa: B010


def is_zero_param(parameter: Any) -> bool:
    """Return whether an object is a sharded parameter."""
    return isinstance(parameter, ShardedParameter)


def z3_leaf_module(model: nn.Module) -> bool:
    """Return whether a module is marked as a leaf: one unit with all its submodules."""
    return bool(getattr(model, FLAG, False))
