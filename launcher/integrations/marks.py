"""Attributes that DeepSpeed puts on parameters, as scripts read them: `ds_id`, `ds_shape`, `ds_numel`, `ds_status`, ...

`hasattr(parameter, "ds_id")` is how libraries ask whether a model is at stage 3, so below that none has it. The
status is wanted of every parameter, and of modules what they use of others. A parameter that was saved for backward
comes back as a plain tensor, with the values that are gathered then: it is asked, too.
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
    """Return the same for all that stand for one parameter."""
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
    """Mark parameters, too, that stay whole at stage 3 because they are small: who counts the parameters of such a
    model asks each of them."""
    for parameter in module.parameters():
        if not isinstance(parameter, ShardedParameter):
            small = {"ds_id": next(_NUMBERS), "ds_shape": parameter.shape, "ds_numel": parameter.numel()}
            small |= {"ds_persist": True, "partition_numel": parameter.numel}
            for name, value in small.items():
                setattr(parameter, name, value)


def _share(parameter: Tensor) -> int:
    """Return the elements of a parameter that a rank holds, on average: slices are of a unit, not of each parameter."""
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
    """Return whether it is a parameter in shards."""
    return isinstance(parameter, ShardedParameter)


def z3_leaf_module(model: nn.Module) -> bool:
    """Return whether a module is marked as one unit with all inside it."""
    return bool(getattr(model, FLAG, False))
