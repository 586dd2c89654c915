"""The split layers: mixins that are put in front of a module's own class, so that it stays what it was for everybody
who asks (`isinstance`, its name in the model, its parameters' names) and computes with this rank's share.

Linear layers of torch, and GPT-2's Conv1D, compute with our own functions; any other class runs its own forward on its
local parameters, between the same borders.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from launcher.comm import Axis
from launcher.tensor.dropout import RandomStreams
from launcher.tensor.functions import (
    enter,
    gather_along,
    leave,
    leave_scattered,
    linear,
    slice_along,
)


@dataclass
class SequenceState:
    """The state of the forward under way: whether its sequences are sliced, and how long they are when whole."""

    active: bool = False
    length: int = 0


@dataclass
class SplitInfo:
    """The facts that a split module has about its split.

    Args:
        axis: the tp axis.
        name: of the module, which tags its collectives.
        overlaps: reduce input gradients while weight gradients are computed.
        streams: random numbers for dropout.
        gathers: sizes on every rank of each packed part of the output, which is gathered; None: it stays split.
        slices: the input is whole, and this rank takes its slice.
        takes: the output becomes whole, and this rank takes its slice.
        sequence: where norms and residuals work on slices of the sequence (`sequence.py`).
        scatters: outputs with at least so many dims are reduce-scattered along the sequence; 0: none are.
        start, stop: the vocabulary ids of this rank.
        rope: features of MLA's rope part.
        linear: the module computes what nn.Linear or Conv1D does; set by `swap`.
        heads: keyword arguments by heads -> (their dim, heads of all ranks).
        once: parameters that are added to an output which is summed over the ranks.
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


class SplitModule(nn.Module):
    """A module whose parameters this rank holds a share of."""

    split: SplitInfo


class ColumnParallel(SplitModule):
    """Output features are split: input whole, output [..., out / degree]."""

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
    """A head [vocabulary, hidden]: logits of all ids, or where the loss can take them so, of this rank's only."""

    def forward(self, x: Tensor) -> Tensor:
        split = self.split
        logits = linear_of(self, enter(x, split.axis, split.name, overlaps=split.overlaps))
        if split.gathers is None:
            return logits
        return gather_along(logits, split.axis, -1, split.name, split.gathers[0])


class RowParallel(SplitModule):
    """Input features are split: input [..., in / degree], output whole, or a slice of the sequence. Bias once."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        split = self.split
        if split.slices:
            x = slice_along(x, split.axis, -1, split.name)
        bias = self._parameters.get("bias")
        try:
            if split.linear:
                y = linear_of(self, x, biased=False)
            else:
                self._parameters["bias"] = None
                y = super().forward(x, *args, **kwargs)
        finally:
            if not split.linear:
                self._parameters["bias"] = bias
            split.streams.end_split()  # also where a recomputation has all it needs, and ends by an exception
        if split.sequence is not None and split.sequence.active and 0 < split.scatters <= y.dim():
            y = leave_scattered(y, split.axis, split.name)
        else:
            y = leave(y, split.axis, split.name, fresh=True)
        y = y if bias is None else y + bias
        return slice_along(y, split.axis, -1, f"{split.name}.output") if split.takes else y


class VocabularyParallelEmbedding(SplitModule):
    """Rows are split: a rank looks its own ids up, the sum over the ranks is the embedding."""

    def forward(self, ids: Tensor) -> Tensor:
        split = self.split
        elsewhere = (ids < split.start) | (ids >= split.stop)
        local = (ids - split.start).masked_fill(elsewhere, 0)
        found = super().forward(local).masked_fill(elsewhere.unsqueeze(-1), 0)
        return leave(found, split.axis, split.name, fresh=True)


class HiddenParallelEmbedding(SplitModule):
    """Columns are split: a rank looks up its slice of every vector, and the slices are gathered."""

    def forward(self, ids: Tensor) -> Tensor:
        split = self.split
        return gather_along(super().forward(ids), split.axis, -1, split.name)


class _Term(torch.autograd.Function):
    """1 / degree of a parameter that every rank adds to its term of a sum: it is added once in all, so each rank has
    the whole gradient."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, degree: int) -> Tensor:
        return parameter / degree

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class PartialExperts(SplitModule):
    """Experts, each of which is split: whole tokens in, and the sum of what the ranks make of them out."""

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
        """Routing weights get a term of their gradient on each rank, too."""
        if isinstance(value, Tensor) and value.is_floating_point():
            return enter(value, self.split.axis, f"{self.split.name}.weights", overlaps=self.split.overlaps)
        return value


class SlicedHeads(SplitModule):
    """Attention that is given something for each head of all ranks: it gets its own heads' part of that."""

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
    """A norm over features that are split: computed whole, of which each rank goes on with its slice."""

    def forward(self, x: Tensor) -> Tensor:
        split = self.split
        whole = gather_along(x, split.axis, -1, split.name)
        y: Tensor = super().forward(enter(whole, split.axis, split.name, overlaps=split.overlaps))
        return y.narrow(-1, split.axis.rank * x.shape[-1], x.shape[-1])


class IdentityExpert(SplitModule):
    """An expert that returns its input, inside of experts whose outputs are summed over the ranks."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(x / self.split.axis.degree, *args, **kwargs)


class SummedOutput(SplitModule):
    """A module whose output is a term of a sum over the ranks."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return leave(super().forward(*args, **kwargs), self.split.axis, self.split.name)


class LatentAndRope(SplitModule):
    """MLA's down-projection [..., latent + rope]: every rank has it whole. The latent part goes on into a split layer;
    the rope part goes straight to this rank's heads, so its gradient is a term of a sum."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        split = self.split
        y = super().forward(x, *args, **kwargs)
        latent, rope = y.split([y.shape[-1] - split.rope, split.rope], -1)
        return torch.cat([latent, enter(rope, split.axis, split.name, overlaps=split.overlaps)], -1)


_classes: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


def swap(module: nn.Module, mixin: type[SplitModule], layer: SplitInfo) -> None:
    """Put `mixin` in front of the class of `module`."""
    own = type(module)
    layer.linear = own.forward in (nn.Linear.forward, Conv1D.forward)
    module.split = layer  # type: ignore[assignment]
    module.__class__ = _mixed(mixin, own)


def _mixed(mixin: type[nn.Module], own: type[nn.Module]) -> type[nn.Module]:
    if (mixin, own) not in _classes:
        _classes[mixin, own] = type(
            f"{mixin.__name__}{own.__name__}", (mixin, own), {"__module__": own.__module__}
        )
    return _classes[mixin, own]


def linear_of(module: nn.Module, x: Tensor, *, biased: bool = True) -> Tensor:
    """Return what a Linear or Conv1D computes."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    bias = module._parameters.get("bias") if biased else None
    return linear(x, weight, bias, transposed=isinstance(module, Conv1D))


class OwnBackward(nn.Module):
    """A linear layer whose weight gradient can be put off, or added in place (`weight_gradients.py`)."""

    def forward(self, x: Tensor) -> Tensor:
        return linear_of(self, x)


def give_own_backward(module: nn.Module) -> None:
    """Give our backward to every linear layer inside that has no other forward than that."""
    for inner in module.modules():
        own = type(inner)
        if own.forward in (nn.Linear.forward, Conv1D.forward):
            inner.__class__ = _mixed(OwnBackward, own)
