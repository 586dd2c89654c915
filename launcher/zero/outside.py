"""Modules that are called while the model's own forward does not run: an encoder before `generate`, an embedding.

Units are gathered by the forwards of their modules, the root unit by the model's. A module that is called by itself
may need parameters of a unit whose module is not running: then they are gathered for this one call. What it saves for
backward is packed as in the model's forward, so that backward gathers again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.profiler import record_function

from launcher.models.activation import recomputing

if TYPE_CHECKING:
    from launcher.zero.hooks import Hooks
    from launcher.zero.unit import Unit


def watch(hooks: Hooks) -> None:
    """Gather for every module that shows a sharded parameter, when it is called and the parameter is not there."""
    for unit in hooks.units:
        for module in dict.fromkeys(unit.owners()):
            handle = module.register_forward_pre_hook(_before(hooks, unit), prepend=True)
            hooks.add_removable(handle)


def _before(hooks: Hooks, unit: Unit) -> Callable[[nn.Module, Any], None]:
    def before_forward(module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or unit.is_unsharded:
            return
        if recomputing():
            unit.recomputed = True
            hooks.enter_backward(unit)
        elif module is not unit.module:  # that one's own hook gathers
            _open(hooks, unit, module)

    return before_forward


def _open(hooks: Hooks, unit: Unit, module: nn.Module) -> None:
    with record_function(f"{unit.name}/unshard"):
        hooks.fetcher.use(unit, "forward")
    packs = hooks.start_packing()

    def after_forward(module: nn.Module, args: Any, output: Any) -> None:
        closing.remove()
        if packs:
            hooks.stop_packing()
        hooks.fetcher.reshard(unit)
        if torch.is_grad_enabled():
            hooks.watch_backward(output)

    closing = module.register_forward_hook(after_forward, always_call=True)
