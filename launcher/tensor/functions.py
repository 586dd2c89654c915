"""Differentiable functions over the tp axis, for activations at the boundaries of split layers.

function        forward                              backward
enter           identity                             all-reduce: each rank has its own layers' gradient only
leave           all-reduce of partial sums           identity
leave_scattered reduce-scatter along the sequence    all-gather
slice_along     takes this rank's slice of a dim     all-gather
gather_along    all-gather along a dim               takes this rank's slice: all ranks have the same gradient

The gradient of an activation that several column-parallel layers read (q, k and v; gate and up) is a single
sum, reduced once: an `Entered` counts its readers, and starts the all-reduce when the last of them has added
its term, before this reader computes its weight gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from launcher.comm import Axis, Pending, all_gather, all_reduce, reduce_scatter
from launcher.tensor.parts import even_sizes
from launcher.tensor.weight_gradients import WeightGradient, taken

# ---- collectives on tensors of any shape ------------------------------------------------------


def gathered(tensor: Tensor, axis: Axis, dim: int, tag: str, sizes: Sequence[int] | None = None) -> Tensor:
    """Return the tensors of all ranks concatenated along `dim`.

    Args:
        sizes: size of every rank along `dim`; default: this rank's size on all ranks.
    """
    dim = dim % tensor.dim()
    sizes = [tensor.shape[dim]] * axis.degree if sizes is None else list(sizes)
    longest = max(sizes)
    if tensor.shape[dim] < longest:
        padding = tensor.new_zeros(_resized(tensor.shape, dim, longest - tensor.shape[dim]))
        tensor = torch.cat([tensor, padding], dim)
    full = tensor.new_empty(axis.degree, *tensor.shape)
    full[axis.rank].copy_(tensor)
    all_gather(full.view(-1), axis, tag).wait()
    if dim == 0 and min(sizes) == longest:
        return full.view(-1, *tensor.shape[1:])
    return torch.cat([full[rank].narrow(dim, 0, size) for rank, size in enumerate(sizes)], dim)


def scattered(tensor: Tensor, axis: Axis, dim: int, tag: str) -> Tensor:
    """Return this rank's slice along `dim` of the sum over the axis; the degree must divide `dim`."""
    rows = _rank_major(tensor, dim, axis.degree)
    out = torch.empty_like(rows[0])
    reduce_scatter(rows.view(-1), out.view(-1), axis, tag).wait()
    return out


def _rank_major(tensor: Tensor, dim: int, degree: int) -> Tensor:
    """Turn [..., N * s, ...] into [N, ..., s, ...], contiguous: each rank's slice is one contiguous range."""
    if tensor.shape[:dim].numel() == 1 and tensor.is_contiguous():
        return tensor.view(degree, *tensor.shape[:dim], -1, *tensor.shape[dim + 1 :])
    return torch.stack(tensor.chunk(degree, dim))


def sliced(tensor: Tensor, axis: Axis, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """Return this rank's slice along `dim`, contiguous."""
    sizes = even_sizes(tensor.shape[dim], axis.degree) if sizes is None else sizes
    return tensor.narrow(dim, sum(sizes[: axis.rank]), sizes[axis.rank]).contiguous()


def _resized(shape: torch.Size, dim: int, size: int) -> list[int]:
    return [*shape[:dim], size, *shape[dim + 1 :]]


# ---- entering ---------------------------------------------------------------------------------


class Entered:
    """The gradient of an activation that split layers read, and its reduction over the ranks.

    Args:
        overlaps: start the reduction before the last reader's weight gradient is computed, not after it.
        sequence: the dim along which the activation was gathered, and the sum is scattered; None: all-reduce.
    """

    def __init__(self, axis: Axis, tag: str, *, overlaps: bool, sequence: int | None = None) -> None:
        self.axis, self.tag, self.overlaps, self.sequence = axis, tag, overlaps, sequence
        self.readers = self._left = 0
        self._sum: Tensor | None = None
        self._out: Tensor | None = None
        self._pending: Pending | None = None

    def read(self) -> None:
        self.readers += 1
        self._left = self.readers

    def add(self, gradient: Tensor, weight: Tensor) -> None:
        """Add a reader's term: `gradient` [..., out] x `weight` [out, in]."""
        if self._sum is None:
            self._sum = gradient @ weight
        else:
            flat = self._sum.view(-1, weight.shape[1])
            flat.addmm_(gradient.reshape(-1, weight.shape[0]), weight)
        self._left -= 1
        if self._left == 0 and self.overlaps:
            self._start()

    def _start(self) -> None:
        assert self._sum is not None
        if self.sequence is not None:
            self._sum = _rank_major(self._sum, self.sequence, self.axis.degree)
            self._out = torch.empty_like(self._sum[0])
            self._pending = reduce_scatter(self._sum.view(-1), self._out.view(-1), self.axis, self.tag)
        else:
            self._out = self._sum = self._sum.contiguous()
            self._pending = all_reduce(self._sum.view(-1), self.axis, self.tag)

    def reduced(self, others: Tensor | None) -> Tensor | None:
        """Return the gradient summed over the ranks.

        Args:
            others: the sum of the other readers' terms, as accumulated by autograd.
        """
        if self._pending is None and others is not None:
            # autograd may pass the same tensor to other functions: do not overwrite it
            self._sum = others.clone() if self._sum is None else self._sum.add_(others)
            others = None
        if self._pending is None and self._sum is not None:
            self._start()
        if self._pending is not None:
            self._pending.wait()
        result = self._out
        self._sum = self._out = self._pending = None
        self._left = self.readers
        if others is not None and result is not None:  # the reduction had started before all terms were known
            late = Entered(self.axis, self.tag, overlaps=False, sequence=self.sequence)
            result = torch.add(result, late.reduced(others))  # type: ignore[arg-type]
        return result


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, entered: Entered, full: Tensor | None) -> Tensor:
        ctx.entered = entered
        ctx.set_materialize_grads(False)
        # Not a view: it would reference x, which references it (`_ENTERED`), a cycle that is never freed.
        return x.detach() if full is None else full.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None, None]:
        return ctx.entered.reduced(gradient), None, None


_ENTERED = "_launcher_entered"  # on an activation: (its version, the tensor that split layers read)
_STATE = "_launcher_entered_state"  # on the tensor that split layers read: its Entered


def enter(x: Tensor, axis: Axis, tag: str, *, overlaps: bool = True) -> Tensor:
    """Return `x` for layers split over the axis; all layers that read the same tensor get the same result."""
    if axis.degree == 1 or not (torch.is_grad_enabled() and x.requires_grad) or hasattr(x, _STATE):
        return x
    known = _known(x)
    if known is not None:
        return known
    made = _made(x, Entered(axis, f"{tag}/backward", overlaps=overlaps), None)
    _remember(x, made)
    return made


def enter_gathered(x: Tensor, axis: Axis, tag: str, *, overlaps: bool = True) -> Tensor:
    """Gather `x` [batch, slice of the sequence, ...] along the sequence, or [tokens, ...] along the tokens.

    Gradients from split layers that read the result are partial sums, which are reduce-scattered. Gradients
    from other readers are the same on all ranks, and each rank takes its slice.
    """
    known = _known(x)
    if known is not None:
        return known
    dim = sequence_dim(x)
    full: Tensor = gather_along(x, axis, dim, tag)
    if torch.is_grad_enabled() and x.requires_grad:
        entered = Entered(axis, f"{tag}/backward", overlaps=overlaps, sequence=dim)
        _remember(full, _made(x, entered, full.detach()))
    _remember(x, full)
    return full


def _made(x: Tensor, entered: Entered, full: Tensor | None) -> Tensor:
    """Return the tensor that split layers read in place of `x`."""
    made: Tensor = _Enter.apply(x, entered, full)
    setattr(made, _STATE, entered)
    return made


def _known(x: Tensor) -> Tensor | None:
    """Return the tensor remembered for `x`, if `x` has not been modified since."""
    version, known = getattr(x, _ENTERED, (None, None))
    return known if known is not None and version == x._version else None


def _remember(x: Tensor, read: Tensor) -> None:
    if not x.is_leaf:  # a leaf outlives the graph, and would keep it alive
        setattr(x, _ENTERED, (x._version, read))


def sequence_dim(x: Tensor) -> int:
    """Return the sequence dim of activations [batch, sequence, ...], or of flattened [tokens, hidden]."""
    return min(1, x.dim() - 2)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        entered: Entered | None,
        of: tuple[Tensor, bool],
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.entered, ctx.has_bias, ctx.of = entered, bias is not None, of
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        leaf, transposed = ctx.of
        dx = dw = db = None
        if ctx.entered is not None:
            ctx.entered.add(gradient, weight)
        elif ctx.needs_input_grad[0]:
            dx = gradient @ weight
        rows = gradient.reshape(-1, weight.shape[0])  # [tokens, out]
        columns = x.reshape(-1, weight.shape[1])  # [tokens, in]

        if ctx.needs_input_grad[1] and not taken(WeightGradient(leaf, rows, columns, transposed)):
            dw = rows.t() @ columns
        if ctx.has_bias and ctx.needs_input_grad[2]:
            db = rows.sum(0)
        return dx, dw, db, None, None


def linear(x: Tensor, leaf: Tensor, bias: Tensor | None, *, transposed: bool = False) -> Tensor:
    """Return x [..., in] times a weight [out, in] (`transposed`: [in, out]). `x` may come from `enter`: the
    weight is then this rank's shard. See `weight_gradients.py` for when and where the weight gradient is
    computed."""
    entered: Entered | None = getattr(x, _STATE, None)
    device, weight = x.device.type, leaf.t() if transposed else leaf
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        if x.dtype != dtype:  # the cast creates another tensor; autograd propagates its gradient to x
            x, entered = x.to(dtype), None
    if entered is not None:
        entered.read()
    made: Tensor = _Linear.apply(x, weight, bias, entered, (leaf, transposed))
    return made


# ---- leaving ----------------------------------------------------------------------------------


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, tag: str, fresh: bool) -> Tensor:
        total = x if fresh and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
        if total is x:
            ctx.mark_dirty(x)
        all_reduce(total.view(-1), axis, f"{tag}/forward").wait()
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gradient, None, None, None


class _LeaveScattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, tag: str) -> Tensor:
        ctx.axis, ctx.tag, ctx.dim = axis, tag, sequence_dim(x)
        return scattered(x, axis, ctx.dim, f"{tag}/forward")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gathered(gradient, ctx.axis, ctx.dim, f"{ctx.tag}/backward"), None, None


class _Slice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, tag: str) -> Tensor:
        ctx.axis, ctx.dim, ctx.tag = axis, dim, tag
        ctx.sizes = even_sizes(x.shape[dim], axis.degree)
        return sliced(x, axis, dim, ctx.sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        full = gathered(gradient, ctx.axis, ctx.dim, f"{ctx.tag}/backward", ctx.sizes)
        return full, None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, tag: str, sizes: Sequence[int] | None) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        ctx.sizes = [x.shape[dim]] * axis.degree if sizes is None else sizes
        return gathered(x, axis, dim, f"{tag}/forward", ctx.sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        return sliced(gradient, ctx.axis, ctx.dim, ctx.sizes), None, None, None, None


def leave(x: Tensor, axis: Axis, tag: str, *, fresh: bool = False) -> Tensor:
    """Return the sum of `x` over the ranks.

    Args:
        fresh: `x` is not used elsewhere, and may be overwritten.
    """
    made: Tensor = x if axis.degree == 1 else _Leave.apply(x, axis, tag, fresh)
    return made


def leave_scattered(x: Tensor, axis: Axis, tag: str) -> Tensor:
    """Return this rank's slice, along the sequence, of the sum over the ranks: [batch, sequence, ...] ->
    [batch, sequence / degree, ...]."""
    made: Tensor = x if axis.degree == 1 else _LeaveScattered.apply(x, axis, tag)
    return made


def slice_along(x: Tensor, axis: Axis, dim: int, tag: str) -> Tensor:
    """Return this rank's slice of `x`; `x` must be the same on all ranks."""
    made: Tensor = x if axis.degree == 1 else _Slice.apply(x, axis, dim, tag)
    return made


def gather_along(x: Tensor, axis: Axis, dim: int, tag: str, sizes: Sequence[int] | None = None) -> Tensor:
    """Return all ranks' slices concatenated along `dim`.

    Args:
        sizes: size of every rank along `dim`; default: this rank's size on all ranks.
    """
    made: Tensor = x if axis.degree == 1 else _Gather.apply(x, axis, dim, tag, sizes)
    return made
