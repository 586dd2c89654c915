"""Random numbers for dropout: where activations are split each rank draws its own, elsewhere all draw the same.

All ranks of a tp group have the same random state. Where activations become split, a seed is drawn from it, to which
each rank adds its own number; where they are whole again, the common state is taken up. Nothing is kept between the
two but that state, so a block that is run again from the same state (activation checkpointing) draws the same.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from launcher.comm import Axis

_STEP = 0x9E3779B97F4A7C15  # odd, far apart: seeds of neighbouring ranks have nothing in common
_SEEDS = 1 << 62


class RandomStreams:
    """The two streams of random numbers of a model.

    Args:
        axis: the tp axis.
        device: on which dropout draws.
        on: whether the model drops anything out; else nothing is done.
    """

    def __init__(self, axis: Axis, device: torch.device, *, on: bool) -> None:
        self.axis, self.device = axis, device
        self.on = on and axis.degree > 1
        self._common: tuple[Tensor, Tensor | None] | None = None

    def begin_split(self, training: bool) -> None:
        """Note that activations are split from here on."""
        if not (self.on and training) or self._common is not None:
            return
        seed = int(torch.randint(_SEEDS, ()).item())  # from the CPU's generator: no wait for a device
        accelerator = None if self.device.type == "cpu" else torch.get_device_module(self.device)
        state = None if accelerator is None else accelerator.get_rng_state(self.device)
        self._common = torch.get_rng_state(), state
        seed = (seed + self.axis.rank * _STEP) % _SEEDS
        torch.default_generator.manual_seed(seed)
        if accelerator is not None:
            accelerator.manual_seed(seed)

    def end_split(self) -> None:
        """Note that activations are whole again from here on."""
        if self._common is None:
            return
        (state, on_device), self._common = self._common, None
        torch.set_rng_state(state)
        if on_device is not None:
            torch.get_device_module(self.device).set_rng_state(on_device, self.device)


def drops_out(model: nn.Module) -> bool:
    """Return whether a model has dropout: modules that say so, or numbers of its config with drop in their names."""
    if any(module.p > 0 for module in model.modules() if isinstance(module, nn.modules.dropout._DropoutNd)):
        return True
    config = vars(getattr(model, "config", None) or object)
    return any("drop" in key and isinstance(value, float) and value > 0 for key, value in config.items())
