"""Modules that are called while the model's own forward does not run: an encoder before `generate`, an embedding.

Units are unsharded by the forwards of their modules, the root unit by the model's. A module that is called by itself
may need parameters of a unit whose module is not running: then they are unsharded for this one call. What it saves for
backward is packed as in the model's forward, so that backward unshards again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.profiler import record_function

if TYPE_CHECKING:
    from launcher.zero.hooks import Hooks
    from launcher.zero.unit import Unit


def gather_for_one_call(hooks: Hooks, unit: Unit, module: nn.Module) -> None:
    """Unshard a unit for the forward of a module inside it that begins now."""
    with record_function(f"{unit.name}/unshard"):
        hooks.unsharder.use(unit, "forward")
    packs = hooks.packing.start()

    def after_forward(module: nn.Module, args: Any, output: Any) -> None:
        closing.remove()
        if packs:
            hooks.packing.stop()
        hooks.unsharder.reshard(unit)
        if torch.is_grad_enabled():
            hooks.watch_backward(output)

    closing = module.register_forward_hook(after_forward, always_call=True)
