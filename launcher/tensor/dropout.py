"""Random numbers for dropout: per rank where activations are split, the same on all ranks elsewhere.

All ranks of a tp group have the same random state. Where activations become split, a seed is drawn from it,
and each rank adds its own offset; where they are whole again, the common state is restored. No other state is
kept, so a block that is recomputed from the same random state (activation checkpointing) draws the same
numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from launcher.comm import Axis

_STEP = 0x9E3779B97F4A7C15  # large and odd, so that seeds of neighbouring ranks are far apart
_SEEDS = 1 << 62


class RandomStreams:
    """The two random number streams of a model: one per rank, and one common to all ranks.

    Args:
        axis: the tp axis.
        device: the device on which dropout draws.
        on: whether the model has dropout; if not, all methods do nothing.
    """

    def __init__(self, axis: Axis, device: torch.device, *, on: bool) -> None:
        self.axis, self.device = axis, device
        self.on = on and axis.degree > 1
        self._common: tuple[Tensor, Tensor | None] | None = None

    def begin_split(self, training: bool) -> None:
        """Switch to this rank's stream: activations are split from this point on."""
        if not (self.on and training) or self._common is not None:
            return
        seed = int(torch.randint(_SEEDS, ()).item())  # from the CPU generator: no device synchronisation
        accelerator = None if self.device.type == "cpu" else torch.get_device_module(self.device)
        state = None if accelerator is None else accelerator.get_rng_state(self.device)
        self._common = torch.get_rng_state(), state
        seed = (seed + self.axis.rank * _STEP) % _SEEDS
        torch.default_generator.manual_seed(seed)
        if accelerator is not None:
            accelerator.manual_seed(seed)

    def end_split(self) -> None:
        """Restore the common stream: activations are whole again from this point on."""
        if self._common is None:
            return
        (state, on_device), self._common = self._common, None
        torch.set_rng_state(state)
        if on_device is not None:
            torch.get_device_module(self.device).set_rng_state(on_device, self.device)


def drops_out(model: nn.Module) -> bool:
    """Return whether a model has dropout: modules with p > 0, or positive config values named "*drop*"."""
    if any(module.p > 0 for module in model.modules() if isinstance(module, nn.modules.dropout._DropoutNd)):
        return True
    config = vars(getattr(model, "config", None) or object)
    return any("drop" in key and isinstance(value, float) and value > 0 for key, value in config.items())
