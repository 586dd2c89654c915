"""The MLP of each block in tiles along the sequence (Bekman et al. 2025, arXiv:2506.13996).

Its intermediate activations exist for one tile at a time: in forward and, recomputed, in backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from launcher.errors import ConfigError
from launcher.models.units import unit_modules

NAMES = {"mlp", "feed_forward", "ffn", "ff"}
WHERE = "tiled_mlp"
TOKENS = 2048  # minimum per tile; the hidden size if larger. Smaller tiles cost time and save little memory


class TiledMLPs:
    """Computes the MLPs of a model in tiles.

    Args:
        modules: each maps [B, S, hidden] to [B, S, hidden], one token at a time.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self._own = [(module, type(module)) for module in modules]
        for module, own in self._own:
            module.__class__ = _with_tiles(own)

    def remove(self) -> None:
        """Restore the original MLPs."""
        for module, own in self._own:
            module.__class__ = own


def tile_mlps(model: nn.Module) -> TiledMLPs:
    """Compute the MLPs of a model's blocks in tiles.

    Raises:
        ConfigError: the blocks have no MLP (mixture-of-experts layers do not count).
    """
    found = [
        module
        for _, block in unit_modules(model)
        for name, module in block.named_modules()
        if name.rpartition(".")[2] in NAMES and _is_dense(module)
    ]
    if not found:
        raise ConfigError(
            f"no block of {type(model).__name__} has an MLP of linear layers named {', '.join(sorted(NAMES))}",
            where=WHERE,
            fix="remove the key for this model",
        )
    return TiledMLPs(found)


def _is_dense(module: nn.Module) -> bool:
    """Return whether all parameters belong to linear layers that no router selects.

    A module that owns parameters directly may mix tokens with them (RWKV)."""
    if any(list(one.parameters(recurse=False)) for one in module.modules() if list(one.children())):
        return False
    leaves = [child for child in module.modules() if not list(child.children())]
    weighted = [leaf for leaf in leaves if list(leaf.parameters(recurse=False))]
    listed = any(isinstance(child, nn.ModuleList) for child in module.modules())
    return bool(weighted) and not listed and all(isinstance(leaf, nn.Linear | Conv1D) for leaf in weighted)


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _with_tiles(kind: type[nn.Module]) -> type[nn.Module]:
    class Tiled(kind):  # type: ignore[misc,valid-type]
        def forward(self, x: Tensor, *args: Any, **keywords: Any) -> Any:
            own = super().forward

            def whole(tile: Tensor, *others: Any, **named: Any) -> Any:
                # some layers need contiguous input; a copy made outside of the checkpoint would be saved
                return own(tile.contiguous(), *others, **named)

            if x.dim() != 3:
                return own(x, *args, **keywords)
            size, parts = max(TOKENS, x.shape[2]), []
            for start in range(0, x.shape[1], size):
                tile, others, named = _tile_of((x, args, keywords), x.shape, slice(start, start + size))
                if torch.is_grad_enabled():
                    parts.append(checkpoint(whole, tile, *others, use_reentrant=False, **named))
                else:
                    parts.append(whole(tile, *others, **named))
            return torch.cat(parts, 1)

    Tiled.__name__, Tiled.__qualname__, Tiled.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return _classes.setdefault(kind, Tiled)


def _tile_of(inputs: Any, shape: torch.Size, tokens: slice) -> Any:
    """Return `inputs` with only the tokens of a tile, also in additional tensors such as a residual."""

    def of(one: Any) -> Any:
        of_tokens = isinstance(one, Tensor) and one.shape[:2] == shape[:2]
        return one[:, tokens] if of_tokens else one

    return tree_map(of, inputs)
