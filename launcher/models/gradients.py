"""`.grad` itself, past what a subclass of nn.Parameter makes of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_GRAD: Any = torch.Tensor.grad  # the descriptor of the class


def seen_gradient(tensor: Any) -> Tensor | None:
    """What autograd has put into `.grad`."""
    gradient: Tensor | None = _GRAD.__get__(tensor)
    return gradient


def put_gradient(tensor: Any, gradient: Tensor | None) -> None:
    """Set `.grad`."""
    _GRAD.__set__(tensor, gradient)
