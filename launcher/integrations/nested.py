"""DeepSpeed helpers for nested objects: attributes by dotted name, tensors in containers, versions."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from launcher.integrations.utilities import required_torch_version

__all__ = ["required_torch_version"]


def recursive_getattr(model: Any, module_name: str) -> Any:
    """Return the attribute with a dotted name."""
    return reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Set the attribute with a dotted name."""
    owner, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, owner) if owner else model, name, module)


def apply_to_tensors_only(
    function: Callable[[Tensor], Tensor], value: Any, warning_msg_fn: Callable[[Any], str] | None = None
) -> Any:
    """Return the value with the function applied to its tensors."""
    return tree_map_only(torch.Tensor, function, value)


def register_grad_hook(param: nn.Parameter, hook: Callable[..., Any]) -> Any:
    """Register a hook that is called as hook(param) once the gradient is accumulated."""
    return param.register_post_accumulate_grad_hook(hook)
