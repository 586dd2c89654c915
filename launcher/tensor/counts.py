"""Adjusts attributes of modules that count what is split: heads, features, channels."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from launcher.tensor.parts import IndivisibleError


class ConfigView:
    """A config with overrides for one module; all other attributes are read from the underlying config."""

    def __init__(self, config: Any) -> None:
        self.__dict__["_viewed"] = config

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_viewed" not in self.__dict__:  # looked up by copy and pickle
            raise AttributeError(name)
        return getattr(self._viewed, name)


def divide(module: nn.Module, attribute: str, degree: int, *, replicates: bool) -> None:
    """Divide the number in `attribute` by the degree.

    Args:
        attribute: an attribute of the module, or `config.x` for one of the config that the module reads.
        replicates: whether a number below the degree becomes 1, because several ranks hold the same head.

    Raises:
        IndivisibleError: the degree does not divide the number.
    """
    owner: Any = module
    if attribute.startswith("config."):
        attribute = attribute.removeprefix("config.")
        if not isinstance(module.config, ConfigView):
            module.config = ConfigView(module.config)  # type: ignore[assignment]
        owner = module.config
    value = getattr(owner, attribute)
    if value % degree == 0:
        setattr(owner, attribute, value // degree)
    elif replicates and degree % value == 0:
        setattr(owner, attribute, 1)
    else:
        raise IndivisibleError(value)


_OF_HEADS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value")


def head_size(owner: nn.Module, name: str, size: int) -> int:
    """Return the number of features that stay together: a head's, if attention has `head_dim`; else 1."""
    head = getattr(owner, "head_dim", None)
    heads = name.rpartition(".")[2] in _OF_HEADS and isinstance(head, int) and head > 0 and size % head == 0
    return int(head or 1) if heads else 1


def shared_by_groups(owner: nn.Module, name: str) -> bool:
    """Return whether a projection makes key or value heads that groups of query heads share, so that several
    ranks may hold one head."""
    return name.rpartition(".")[2] in ("k_proj", "v_proj") and hasattr(owner, "num_key_value_groups")


def resize(module: nn.Module, side: str | None) -> None:
    """Update the size attributes of a split module."""
    weight = module._parameters.get("weight")
    if weight is None or side is None:
        return
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = weight.shape
    if isinstance(module, Conv1D):
        module.nx, module.nf = weight.shape
    if isinstance(module, nn.Embedding):
        module.num_embeddings, module.embedding_dim = weight.shape
        layer: Any = module.split
        pad = module.padding_idx
        if side == "rows" and pad is not None:
            module.padding_idx = pad - layer.start if layer.start <= pad < layer.stop else None
