"""The loss of a causal LM in tiles along the sequence: no rank ever holds the logits of all its tokens.

The head is not computed when the model calls it. Instead it returns `DeferredLogits`, which record the
operations that the model's forward applies to the logits (caps, scales, casts), until they reach
`loss_function`. There the head, the recorded operations and the loss are computed for one tile of tokens at a
time, and recomputed in backward (Bekman et al. 2025, arXiv:2506.13996)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from launcher.data.documents import IGNORED
from launcher.errors import ConfigError, LauncherError
from launcher.sequence.inputs import LABELS, SHIFTED, labels_of_next
from launcher.tensor.head import SplitHead, wants_gathered_head
from launcher.tensor.split_model import wants_no_logits

TILE = 1 << 25  # logits per tile
WHERE = "tiled_loss"
_STEPS = {"div", "true_divide", "mul", "multiply", "tanh", "float", "to", "type", "half", "bfloat16"}
"""Elementwise torch functions that can be deferred."""


def why_not(model: nn.Module) -> str | None:
    """Return why the loss of a model cannot be computed in tiles; None if it can."""
    if not isinstance(model, PreTrainedModel):
        return "it is not a transformers model"
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        return "it has no linear output head"
    own = getattr(model.loss_function, "__self__", None)
    return None if isinstance(own, SplitHead) else wants_gathered_head(model)


class TiledLoss:
    """Computes the loss of a model in tiles, while it trains or when only its loss is requested.

    Args:
        model: has a linear head, and passes the head's output to `loss_function`.
        tile: logits per tile; default: `TILE`.

    Attributes:
        wanted: the current forward computes a loss in tiles.
        width: logits per token on this rank.
        widest: logits per token on the rank with the most.
    """

    def __init__(self, model: PreTrainedModel, tile: int = 0) -> None:
        self.model, self.tile, self.wanted = model, tile or TILE, False
        self.head: Any = model.get_output_embeddings()
        self.own_loss, self.own_class = model.loss_function, type(self.head)
        split = getattr(self.own_loss, "__self__", None)
        self.width: int = split.width if isinstance(split, SplitHead) else self.head.out_features
        # ranks with vocabulary shards of different sizes must use the same tiles
        self.widest = max(split.sizes) if isinstance(split, SplitHead) else self.width
        self._handles = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, always_call=True),
        ]
        self.head.tiled_loss = self
        self.head.__class__ = _with_tiles(self.own_class)
        model.loss_function = self.loss

    def remove(self) -> None:
        """Restore the model's own head and loss."""
        for handle in self._handles:
            handle.remove()
        self.model.loss_function, self.head.__class__ = self.own_loss, self.own_class
        del self.head.tiled_loss

    def loss(
        self, logits: Any, labels: Tensor | None, vocab_size: int, *args: Any, **keywords: Any
    ) -> Tensor:
        """Return the model's `loss_function`."""
        if not isinstance(logits, DeferredLogits):
            found: Tensor = self.own_loss(logits, labels, vocab_size, *args, **keywords)
            return found
        ignored = keywords.get("ignore_index", IGNORED)
        shifted = labels_of_next(
            {LABELS: labels, SHIFTED: keywords.pop(SHIFTED, None), "ignore_index": ignored}
        )
        assert shifted is not None
        if keywords.get("num_items_in_batch") is None:
            keywords["num_items_in_batch"] = (shifted != ignored).sum()

        def of_tile(logits: Tensor, labels: Tensor) -> Tensor:
            found: Tensor = self.own_loss(logits, labels, vocab_size, *args, shift_labels=labels, **keywords)
            return found

        self.wanted = False
        tokens = max(1, self.tile // (self.widest * shifted.shape[:-1].numel()))
        total: Tensor = self.head(_Tiles(logits, shifted, tokens, of_tile))
        return total

    def _before(self, module: nn.Module, args: Any, keywords: Mapping[str, Any]) -> None:
        # Without labels, a model computes no loss and its caller reads the logits.
        self.wanted = keywords.get(LABELS) is not None and wants_no_logits(module)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        self.wanted = False


@dataclass(frozen=True, eq=False)
class DeferredLogits:
    """Placeholder for the logits of all tokens until their loss is computed.

    Args:
        model: class name of the model, for error messages.
        hidden: [B, S, hidden], the input of the head.
        shape, dtype: shape and dtype of the logits.
        steps: operations that the model applies to the logits.
    """

    model: str
    hidden: Tensor
    shape: torch.Size
    dtype: torch.dtype
    steps: tuple[Callable[[Tensor], Tensor], ...] = ()

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    def then(self, step: Callable[[Tensor], Any]) -> DeferredLogits:
        """Return a copy with another step appended."""
        dtype = step(torch.empty(0, dtype=self.dtype, device=self.device)).dtype
        return replace(self, dtype=dtype, steps=(*self.steps, step))

    def float(self) -> DeferredLogits:
        return self.then(lambda x: x.float())

    def to(self, *args: Any, **keywords: Any) -> DeferredLogits:
        return self.then(lambda x: x.to(*args, **keywords))

    def __truediv__(self, other: Any) -> DeferredLogits:
        return self.then(lambda x: x / self._one(other))

    def __mul__(self, other: Any) -> DeferredLogits:
        return self.then(lambda x: x * self._one(other))

    __rmul__ = __mul__

    def tanh(self) -> DeferredLogits:
        return self.then(torch.tanh)

    def contiguous(self) -> DeferredLogits:
        return self

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        at = next(place for place, arg in enumerate(args) if isinstance(arg, DeferredLogits))
        self, name = args[at], getattr(func, "__name__", str(func)).strip("_").removeprefix("r")
        if name not in _STEPS:
            raise self._refusal(f"torch.{name}()")
        others = [arg if place == at else self._one(arg) for place, arg in enumerate(args)]
        return self.then(lambda x: func(*others[:at], x, *others[at + 1 :], **(kwargs or {})))

    def _one(self, other: Any) -> Any:
        """Return `other` if it is a scalar, the same for all logits; raise otherwise."""
        if isinstance(other, DeferredLogits) or (isinstance(other, Tensor) and other.numel() > 1):
            raise self._refusal("an operation with another tensor")
        return other

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._refusal(f"outputs.logits.{name}")

    def __getitem__(self, key: Any) -> Any:
        raise self._refusal("outputs.logits[...]")

    def __len__(self) -> int:
        raise self._refusal("len(outputs.logits)")

    def __iter__(self) -> Any:
        raise self._refusal("iterating over outputs.logits")

    def _refusal(self, who: str) -> LauncherError:
        return DeferredLogitsError(
            f"{who} needs the full logits of {self.model} (shape {tuple(self.shape)}), which are never materialised "
            "because the loss is computed in tiles during training",
            where="outputs.logits",
            fix='call the model without labels, or in eval mode; or set "tiled_loss": false',
        )


class DeferredLogitsError(LauncherError, AttributeError):
    """Raised when code reads logits that were never computed."""


@dataclass(frozen=True, eq=False)
class _Tiles:
    """The loop over tiles. The head is called with it, to gather its parameters once for all tiles.

    Args:
        labels: shifted label of each position: [B, S].
        tokens: tokens of a row in one tile.
        loss: returns the loss of a tile from its logits and labels.
    """

    logits: DeferredLogits
    labels: Tensor
    tokens: int
    loss: Callable[[Tensor, Tensor], Tensor] = field(repr=False)

    def run(self, head: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the sum of the losses of all tiles."""

        def of_tile(hidden: Tensor, labels: Tensor) -> Tensor:
            logits = head(hidden.view_as(hidden))  # a new view, as split layers record their readers on it
            for step in self.logits.steps:
                logits = step(logits)
            return self.loss(logits, labels)

        hidden, total = self.logits.hidden, None
        for start in range(0, hidden.shape[-2], self.tokens):
            number = min(self.tokens, hidden.shape[-2] - start)
            tile = hidden.narrow(-2, start, number), self.labels.narrow(-1, start, number).contiguous()
            if torch.is_grad_enabled():
                part: Tensor = checkpoint(of_tile, *tile, use_reentrant=False, preserve_rng_state=False)
            else:
                part = of_tile(*tile)
            total = part if total is None else total + part
        assert total is not None
        return total


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _with_tiles(own: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of the head's class that defers. A hook would be too late: a deferred call must not
    gather the parameters."""

    class Tiled(own):  # type: ignore[misc,valid-type]
        def __call__(self, x: Any, *args: Any, **keywords: Any) -> Any:
            tiled: TiledLoss = self.tiled_loss
            if not tiled.wanted or isinstance(x, _Tiles):
                return super().__call__(x, *args, **keywords)
            shape = torch.Size((*x.shape[:-1], tiled.width))
            return DeferredLogits(type(tiled.model).__name__, x, shape, _computed_dtype(x))

        def forward(self, x: Any, *args: Any, **keywords: Any) -> Any:
            return x.run(super().forward) if isinstance(x, _Tiles) else super().forward(x, *args, **keywords)

    Tiled.__name__, Tiled.__qualname__, Tiled.__module__ = own.__name__, own.__qualname__, own.__module__
    return _classes.setdefault(own, Tiled)


def _computed_dtype(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def tile_loss(model: nn.Module, wanted: bool | None, *, shared: bool) -> TiledLoss | None:
    """Compute the loss of a model in tiles, as configured.

    Args:
        wanted: the config's value; None: if sequences are sharded and the model allows it.
        shared: sequences are sharded.

    Raises:
        ConfigError: tiles are requested, but the model does not allow them.
    """
    if wanted is False or (wanted is None and not shared):
        return None
    found = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), model)
    reason = why_not(found)
    if reason is None:
        assert isinstance(found, PreTrainedModel)
        return TiledLoss(found)
    if wanted:
        raise ConfigError(
            f"the loss of {type(found).__name__} cannot be computed in tiles: {reason}",
            where=WHERE,
            fix="remove the key; all logits are then computed at once",
        )
    return None
