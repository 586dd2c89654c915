"""Tensors of a model with experts in the Hub's layout: one per expert and projection, under its names.

Other programs and older versions of transformers read this layout."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from launcher.models.stacked_names import apart, names_apart
from launcher.models.units import holds_experts


class HubLayout:
    """Maps the tensors of a model to the tensors stored in a directory.

    Args:
        model: any model; the layouts differ only if its experts are in one tensor.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model if _is_stored_otherwise(model) else None

    def entries(
        self, name: str, dtype: torch.dtype, shape: torch.Size, fetch: Callable[[], Tensor | None]
    ) -> list[tuple[str, torch.dtype, tuple[int, ...], Callable[[], Tensor | None]]]:
        """Return the stored tensors of one tensor of the model, to be fetched in this order.

        Args:
            fetch: called once, when the first of them is fetched, on every rank.
        """
        if self._model is None and not names_apart(name, 1):
            return [(name, dtype, tuple(shape), fetch)]
        stored = self._stored(name, torch.empty(shape, dtype=dtype, device="meta"))
        parts = _Parts(fetch, lambda value: self._stored(name, value))
        return [
            (key, dtype, tuple(value.shape), lambda key=key: parts.take(key))  # type: ignore[misc]
            for key, value in stored.items()
        ]

    def _stored(self, name: str, value: Tensor) -> dict[str, Tensor]:
        if self._model is None:
            return apart(name, value)
        from transformers.core_model_loading import revert_weight_conversion

        model: Any = self._model
        stored: dict[str, Tensor] = revert_weight_conversion(model, {name: value})
        return stored


class _Parts:
    """The parts of a tensor, which is fetched once and kept until its last part is taken."""

    def __init__(
        self, fetch: Callable[[], Tensor | None], split: Callable[[Tensor], dict[str, Tensor]]
    ) -> None:
        self._fetch, self._split = fetch, split
        self._left: dict[str, Tensor] | None = None

    def take(self, name: str) -> Tensor | None:
        if self._left is None:
            whole = self._fetch()
            self._left = {} if whole is None else self._split(whole)
        return self._left.pop(name, None)


def _is_stored_otherwise(model: nn.Module) -> bool:
    """Return whether a transformers model has experts, and names or tensors that differ from the Hub's."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return False
    from transformers.conversion_mapping import get_model_conversion_mapping

    has_experts = any(holds_experts(module) for module in model.modules())
    return has_experts and bool(get_model_conversion_mapping(model, add_legacy=False))
