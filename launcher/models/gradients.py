"""Direct access to `.grad` and `.data`, bypassing the properties of nn.Parameter subclasses.

These are torch.Tensor's C getters and setters: the engine calls them for every parameter in every step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_GRAD: Any = torch.Tensor.grad
_DATA: Any = torch.Tensor.data

seen_gradient: Callable[[Any], Tensor | None] = _GRAD.__get__
"""Get `.grad`."""

put_gradient: Callable[[Any, Tensor | None], None] = _GRAD.__set__
"""Set `.grad`."""

put_data: Callable[[Any, Tensor], None] = _DATA.__set__
"""Set `.data`."""
