"""The split layers: mixins placed before a module's own class. `isinstance`, the module's name and its
parameters' names stay as they are, while it computes with this rank's shard.

nn.Linear, and GPT-2's Conv1D, compute with this package's functions; any other class runs its own forward on
its local parameters, between the same collectives.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from launcher.comm import Axis
from launcher.errors import ConfigError, MisplacedCallError
from launcher.tensor.dropout import RandomStreams
from launcher.tensor.functions import (
    enter,
    gather_along,
    leave,
    leave_scattered,
    linear,
    slice_along,
)

logger = logging.getLogger("launcher")
_AWARE = ("launcher", "torch", "transformers", "accelerate", "peft")
"""Packages that may read the weight of a split head: they do not compute a loss with it."""


@dataclass
class SequenceState:
    """The state of the current forward: whether its sequences are sliced, and their length when whole."""

    active: bool = False
    length: int = 0


@dataclass
class SplitInfo:
    """Describes how a module is split.

    Args:
        axis: the tp axis.
        name: name of the module, which tags its collectives.
        overlaps: reduce input gradients while weight gradients are computed.
        streams: random numbers for dropout.
        gathers: for each packed part of the output, its sizes on every rank: the output is gathered. None: it
            stays split.
        slices: the input is whole, and this rank takes its slice.
        takes: the output is reduced to the whole, and this rank takes its slice.
        sequence: set if norms and residuals work on slices of the sequence (`sequence.py`).
        scatters: outputs with at least this many dims are reduce-scattered along the sequence; 0: none are.
        start, stop: the range of vocabulary ids of this rank.
        rope: number of features of MLA's rope part.
        linear: whether the module's own forward is that of nn.Linear or Conv1D; set by `swap`.
        heads: keyword arguments that have a value per head -> (their head dim, total heads of all ranks).
        once: parameters that are added to an output which is summed over the ranks.
        inner: name of the child that has the bias, if it is a layer with adapters (`adapters.py`).
        warned: a warning about readers of a shard has been logged.
    """

    axis: Axis
    name: str
    overlaps: bool
    streams: RandomStreams
    gathers: list[list[int]] | None = None
    slices: bool = False
    takes: bool = False
    sequence: SequenceState | None = None
    scatters: int = 0
    start: int = 0
    stop: int = 0
    rope: int = 0
    linear: bool = False
    heads: dict[str, tuple[int, int]] = field(default_factory=dict)
    once: tuple[str, ...] = ()
    inner: str = ""
    warned: bool = False


class SplitModule(nn.Module):
    """A module of whose parameters this rank holds a shard."""

    split: SplitInfo

    def own_parameters(self) -> dict[str, nn.Parameter | None]:
        """Return the parameters of the layer itself, without those of its adapters."""
        inner = self.split.inner
        return self._modules[inner]._parameters if inner else self._parameters  # type: ignore[union-attr]

    def unload_and_optionally_merge_module(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse PEFT's `merge_and_unload()` and `unload()`, which call this: they would put layers without
        collectives in the place of split ones."""
        raise MisplacedCallError(
            f"the adapters of {self.split.name} cannot be taken off: the layer is split over tensor-parallel ranks",
            where="merge_and_unload()",
            fix="save the model with engine.save_16bit_model() or PEFT's adapter by a Trainer, and merge it in "
            "one process; merge_adapter() works",
        )

    def update_layer(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse PEFT's `add_adapter()` and `load_adapter()`, which call this: the factors would not be split."""
        raise MisplacedCallError(
            f"{self.split.name} cannot get another adapter: it is split over tensor-parallel ranks",
            where="add_adapter()",
            fix="add and load adapters before initialize()",
        )


class ColumnParallel(SplitModule):
    """A layer with split output features: the input is whole, the output is [..., out / degree]."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        split = self.split
        x = enter(x, split.axis, split.name, overlaps=split.overlaps)
        y = linear_of(self, x) if split.linear else super().forward(x, *args, **kwargs)
        if split.gathers is None:
            split.streams.begin_split(self.training)
            return y
        parts = y.split([sizes[split.axis.rank] for sizes in split.gathers], -1)
        joined = [
            gather_along(part, split.axis, -1, split.name, sizes)
            for part, sizes in zip(parts, split.gathers, strict=True)
        ]
        return joined[0] if len(joined) == 1 else torch.cat(joined, -1)


class VocabularyHead(SplitModule):
    """A head [vocabulary, hidden]: returns logits of all ids, or of this rank's if the loss supports it."""

    @property
    def weight(self) -> Tensor:
        """The rows of this rank. Code of others that trains with them gets a warning: it may expect all rows."""
        reader = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        split = self.split
        if self.training and torch.is_grad_enabled() and reader not in _AWARE and not split.warned:
            split.warned = True
            logger.warning(
                "%s reads the weight of %s, which has only rows %d to %d on this tensor-parallel rank: call the "
                "layer instead, or set the model's forward before initialize(), so that the head stays whole",
                *(reader, split.name, split.start, split.stop - 1),
            )
        weight = self._parameters["weight"]
        assert weight is not None
        return weight

    def forward(self, x: Tensor) -> Tensor:
        split = self.split
        logits = linear_of(self, enter(x, split.axis, split.name, overlaps=split.overlaps))
        if split.gathers is None:
            return logits
        return gather_along(logits, split.axis, -1, split.name, split.gathers[0])


class RowParallel(SplitModule):
    """A layer with split input features: the input is [..., in / degree], the output is whole or a slice of
    the sequence. The bias is added once, after the sum over the ranks."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        split = self.split
        if split.slices:
            x = slice_along(x, split.axis, -1, split.name)
        parameters = self.own_parameters()
        bias = parameters.get("bias")
        try:
            if split.linear:
                y = linear_of(self, x, biased=False)
            else:
                parameters["bias"] = None
                y = super().forward(x, *args, **kwargs)
        finally:
            if not split.linear:
                parameters["bias"] = bias
            split.streams.end_split()  # also if a recomputation stops early, which it does by an exception
        if split.sequence is not None and split.sequence.active and 0 < split.scatters <= y.dim():
            y = leave_scattered(y, split.axis, split.name)
        else:
            y = leave(y, split.axis, split.name, fresh=not y._is_view())
        y = y if bias is None else y + bias
        return slice_along(y, split.axis, -1, f"{split.name}.output") if split.takes else y


class VocabularyParallelEmbedding(SplitModule):
    """An embedding with split rows: each rank looks up its own ids, and the results are all-reduced."""

    def forward(self, ids: Tensor) -> Tensor:
        split = self.split
        elsewhere = (ids < split.start) | (ids >= split.stop)
        local = (ids - split.start).masked_fill(elsewhere, 0)
        found = super().forward(local).masked_fill(elsewhere.unsqueeze(-1), 0)
        return leave(found, split.axis, split.name, fresh=True)


class HiddenParallelEmbedding(SplitModule):
    """An embedding with split columns: each rank looks up its slice of every vector; these are gathered."""

    def forward(self, ids: Tensor) -> Tensor:
        split = self.split
        return gather_along(super().forward(ids), split.axis, -1, split.name)


class _Term(torch.autograd.Function):
    """Returns 1 / degree of a parameter that every rank adds to its term of a sum over the ranks: in total,
    the parameter is added once. Each rank gets the full gradient."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, degree: int) -> Tensor:
        return parameter / degree

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class PartialExperts(SplitModule):
    """Experts, each of which is split: inputs are whole tokens, outputs are summed over the ranks."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        split = self.split
        x = enter(x, split.axis, split.name, overlaps=split.overlaps)
        weighted = [self._entered(a) for a in args]
        keyed = {key: self._entered(a) for key, a in kwargs.items()}
        split.streams.begin_split(self.training)
        whole = {key: self._parameters[key] for key in split.once}
        try:
            for key, parameter in whole.items():
                self._parameters[key] = _Term.apply(parameter, split.axis.degree)
            y = super().forward(x, *weighted, **keyed)
        finally:
            self._parameters.update(whole)
            split.streams.end_split()  # as in RowParallel
        return leave(y, split.axis, split.name)

    def _entered(self, value: Any) -> Any:
        """Sum the gradients of routing weights over the ranks, too: each rank has only a term of them."""
        if isinstance(value, Tensor) and value.is_floating_point():
            return enter(value, self.split.axis, f"{self.split.name}.weights", overlaps=self.split.overlaps)
        return value


class SlicedHeads(SplitModule):
    """Attention with arguments that have a value per head of all ranks: takes those of this rank's heads."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        split = self.split
        for key, (dim, heads) in split.heads.items():
            value = kwargs.get(key)
            if value is not None and value.shape[dim] > 1:  # [..., heads, ...] or [batch x heads, ...]
                grouped = value.unflatten(dim, (-1, heads))
                own = slice_along(grouped, split.axis, dim + 1, f"{split.name}.{key}")
                kwargs[key] = own.flatten(dim, dim + 1)
        return super().forward(*args, **kwargs)


class WholeNorm(SplitModule):
    """A norm over split features: gathers them, computes the whole norm, and returns this rank's slice."""

    def forward(self, x: Tensor) -> Tensor:
        split = self.split
        whole = gather_along(x, split.axis, -1, split.name)
        y: Tensor = super().forward(enter(whole, split.axis, split.name, overlaps=split.overlaps))
        return y.narrow(-1, split.axis.rank * x.shape[-1], x.shape[-1])


class IdentityExpert(SplitModule):
    """An expert that returns its input, among experts whose outputs are summed over the ranks."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(x / self.split.axis.degree, *args, **kwargs)


class SummedOutput(SplitModule):
    """A module whose output is a term of a sum over the ranks."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return leave(super().forward(*args, **kwargs), self.split.axis, self.split.name)


class LatentAndRope(SplitModule):
    """MLA's down-projection [..., latent + rope], replicated on every rank. The latent part is the input of a
    split layer; the rope part is read directly by this rank's heads, so its gradient is summed over the
    ranks."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        split = self.split
        y = super().forward(x, *args, **kwargs)
        latent, rope = y.split([y.shape[-1] - split.rope, split.rope], -1)
        return torch.cat([latent, enter(rope, split.axis, split.name, overlaps=split.overlaps)], -1)


_classes: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


def swap(module: nn.Module, mixin: type[SplitModule], layer: SplitInfo) -> None:
    """Put `mixin` in front of the class of `module`.

    Raises:
        ConfigError: the module has a forward of its own, which would run instead of the mixin's.
    """
    if "forward" in vars(module):
        raise ConfigError(
            f"the forward of {layer.name} was replaced, which tensor parallelism does not support",
            where="tensor_parallel",
            fix="call initialize() before anything that patches modules (hooks of accelerate, X-LoRA)",
        )
    own = type(module)
    layer.linear = own.forward in (nn.Linear.forward, Conv1D.forward)
    module.split = layer  # type: ignore[assignment]
    module.__class__ = _mixed(mixin, own)


def _mixed(mixin: type[nn.Module], own: type[nn.Module]) -> type[nn.Module]:
    if (mixin, own) not in _classes:
        _classes[mixin, own] = type(
            f"{mixin.__name__}{own.__name__}",
            (mixin, own),
            {"__module__": own.__module__, "class_before": own},
        )
    return _classes[mixin, own]


def linear_of(module: nn.Module, x: Tensor, *, biased: bool = True) -> Tensor:
    """Return the output of a Linear or Conv1D."""
    weight: Any = module._parameters["weight"]
    bias = module._parameters.get("bias") if biased else None
    return linear(x, weight, bias, transposed=isinstance(module, Conv1D))


class OwnBackward(nn.Module):
    """A linear layer whose weight gradient can be deferred, or added in place (`weight_gradients.py`)."""

    def forward(self, x: Tensor) -> Tensor:
        return linear_of(self, x)


def give_own_backward(module: nn.Module) -> None:
    """Convert every module inside whose forward is that of nn.Linear or Conv1D to `OwnBackward`."""
    for inner in module.modules():
        own = type(inner)
        if own.forward in (nn.Linear.forward, Conv1D.forward):
            inner.__class__ = _mixed(OwnBackward, own)
