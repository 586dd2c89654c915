"""Gathers for modules called outside the model's own forward: an encoder before `generate`, an embedding.

Units are unsharded by the forwards of their modules, the root unit by that of the model. A module that is
called on its own may need parameters of a unit whose module is not running: these are unsharded for this one
call. Tensors that it saves for backward are packed as in the model's forward, so the backward unshards the
unit again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from launcher.comm.collectives import profiler_range

if TYPE_CHECKING:
    from launcher.zero.hooks import Hooks
    from launcher.zero.unit import Unit


def gather_for_one_call(hooks: Hooks, unit: Unit, module: nn.Module) -> None:
    """Unshard a unit for the forward of a submodule that is about to run."""
    with profiler_range(unit.name, "unshard"):
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
