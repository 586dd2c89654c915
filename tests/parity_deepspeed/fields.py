"""A model whose gradients are given element by element, to test an optimizer alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

STEPS = 10
REST: dict[str, Any] = {"train_batch_size": 1, "gradient_clipping": 0}  # rest of the JSON
SHAPES = {"up": (24, 16), "down": (16, 40), "square": (16, 16), "embed": (32, 16), "norm": (16,)}


class Fields(nn.Module):
    """One parameter of each shape. The loss of a step is the product of parameters and that step's gradients."""

    def __init__(self) -> None:
        super().__init__()
        for i, (name, shape) in enumerate(SHAPES.items()):
            values = torch.randn(shape, generator=torch.Generator().manual_seed(i))
            self.register_parameter(name, nn.Parameter(values))

    def forward(self, step: int) -> Tensor:
        pairs = zip(self.parameters(), gradients(step), strict=True)
        return torch.stack([(p * g).sum() for p, g in pairs]).sum()


def gradients(step: int) -> list[Tensor]:
    """Return the gradient of each parameter at a step."""
    generator = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(shape, generator=generator) * 0.1 for shape in SHAPES.values()]


def follow(engine: Any) -> dict[str, list[float]]:
    """Return the weights after STEPS steps of an engine over Fields."""
    for step in range(STEPS):
        engine.backward(engine(step))
        engine.step()
    return {name: p.detach().flatten().tolist() for name, p in engine.module.named_parameters()}
