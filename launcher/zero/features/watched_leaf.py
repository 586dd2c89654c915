"""A parameter that notes who asks for its `.data` (`edits.py`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_DATA: Any = torch.Tensor.data


class WatchedLeaf(nn.Parameter):
    """A leaf with master weights elsewhere. It notes that `.data` was asked for, through which it can be edited."""

    zero_touched: bool

    @property  # type: ignore[override]
    def data(self) -> Tensor:
        self.zero_touched = True
        values: Tensor = _DATA.__get__(self)
        return values

    @data.setter
    def data(self, values: Tensor) -> None:
        _DATA.__set__(self, values)
