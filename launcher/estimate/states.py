"""Bytes of optimizer states, measured by stepping the optimizer on a small tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from launcher.config import Config
from launcher.engine.dtypes import state_dtype
from launcher.estimate.offloaded_bytes import OffloadedBytes
from launcher.optim.build import choose
from launcher.zero.flat import FlatBuffer
from launcher.zero.gradients import FlatGradient

SIZE = 48  # elements


@dataclass(frozen=True)
class OptimizerStates:
    """The states that an optimizer keeps for a slice of a parameter.

    Args:
        dtypes: dtypes of the states with a value for each element.
        once: total bytes of the other states.
    """

    dtypes: dict[str, torch.dtype]
    once: int

    def bytes_of(self, numel: int) -> int:
        """Return the bytes of the states for `numel` elements."""
        return self.once + numel * sum(dtype.itemsize for dtype in self.dtypes.values())


class StateBytes:
    """The bytes of states that the configured optimizer keeps for each parameter.

    Args:
        config: resolved configuration.
        model: model with the parameters' names and shapes.
    """

    def __init__(self, config: Config, model: nn.Module) -> None:
        self._chosen = choose(config, None, None, model)
        groups = [] if self._chosen is None else self._chosen[1]
        self._group_of = {name: i for i, group in enumerate(groups) for name in group["names"]}
        self._widest = state_dtype(config)
        self._found: dict[tuple[int, torch.dtype], OptimizerStates] = {}

    def of(self, gradients: Iterable[FlatGradient]) -> OffloadedBytes:
        """Return the bytes of the states for the shards that a rank owns, by placement."""
        held: OffloadedBytes = Counter()
        for gradient in gradients:
            flat = gradient.flat
            for slot, start, stop in flat.overlaps(flat.owned):
                if slot.name in self._group_of:
                    kept = self._kept(self._group_of[slot.name], self._dtype_of(flat))
                    in_memory = (
                        kept.once if flat.optim_placement.tier is not None else kept.bytes_of(stop - start)
                    )
                    held[flat.optim_placement] += in_memory
        return held

    def dtypes(self, gradient: FlatGradient) -> dict[str, torch.dtype]:
        """Return name -> dtype of the states with a value for each element of a buffer."""
        names = (slot.name for slot in gradient.flat.slots if slot.name in self._group_of)
        name = next(names, None)
        if name is None:
            return {}
        return self._kept(self._group_of[name], self._dtype_of(gradient.flat)).dtypes

    def _dtype_of(self, flat: FlatBuffer) -> torch.dtype:
        return flat.master_dtype if flat.master_dtype == self._widest else torch.float32

    def _kept(self, group: int, dtype: torch.dtype) -> OptimizerStates:
        if (group, dtype) not in self._found:
            self._found[group, dtype] = self._stepped(group, dtype)
        return self._found[group, dtype]

    def _stepped(self, group: int, dtype: torch.dtype) -> OptimizerStates:
        assert self._chosen is not None
        factory, groups = self._chosen
        options = {key: value for key, value in groups[group].items() if key not in ("names", "params")}
        tensor = nn.Parameter(torch.zeros(SIZE, dtype=dtype))
        tensor.grad = torch.zeros_like(tensor)
        inner = factory([{**options, "params": [tensor]}])
        inner.step()
        state: dict[str, Any] = inner.state[tensor]
        tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        each = {key: value.dtype for key, value in tensors.items() if value.numel() == SIZE}
        return OptimizerStates(each, sum(value.nbytes for key, value in tensors.items() if key not in each))
