"""`.grad` and `.data` themselves, past what a subclass of nn.Parameter makes of them.

These are the setters and getters of torch's class, in C: the engine calls them for every parameter in every step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_GRAD: Any = torch.Tensor.grad
_DATA: Any = torch.Tensor.data

seen_gradient: Callable[[Any], Tensor | None] = _GRAD.__get__
"""What autograd has put into `.grad`."""

put_gradient: Callable[[Any, Tensor | None], None] = _GRAD.__set__
"""Set `.grad`."""

put_data: Callable[[Any, Tensor], None] = _DATA.__set__
"""Set `.data`."""
