"""Controls when linear layers compute their weight gradients, and where they accumulate them.

Default: at once, accumulated by autograd. Deferred (Qi et al. 2023, arXiv:2401.10241): backward computes
input gradients only, and stores the inputs of weight gradients in `DeferredWeightGrads`. In place: for
microbatches whose gradients are only accumulated, the matmul adds directly to the accumulated gradient,
without a temporary tensor. These gradients bypass autograd and its hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from launcher.models.gradients import put_gradient

# leaf -> buffer to add its gradient to: leaf.grad, or memory for it; None: it must go through autograd
GradientBuffer = Callable[[Tensor], Tensor | None]

_put_off: DeferredWeightGrads | None = (
    None  # not a ContextVar: autograd runs GPU backwards in its own threads
)
_place: GradientBuffer | None = None


@dataclass(frozen=True, slots=True)
class WeightGradient:
    """A weight gradient that is not computed yet.

    Args:
        leaf: the weight [out, in]; `transposed`: [in, out].
        rows: gradients of the outputs [tokens, out].
        columns: inputs [tokens, in].
    """

    leaf: Tensor
    rows: Tensor
    columns: Tensor
    transposed: bool

    def computed(self) -> Tensor:
        """Compute the gradient, shaped like the leaf."""
        left, right = self._factors
        return (left @ right).to(self.leaf.dtype)

    def added(self, place: GradientBuffer) -> bool:
        """Add the gradient to the leaf's buffer; return False if it must go through autograd instead."""
        sum_ = place(self.leaf)
        if sum_ is None or sum_.dtype != self.rows.dtype:
            return False
        left, right = self._factors
        if self.leaf.grad is None:
            torch.mm(left, right, out=sum_)
            put_gradient(self.leaf, sum_)
        else:
            sum_.addmm_(left, right)
        return True

    @property
    def _factors(self) -> tuple[Tensor, Tensor]:
        if self.transposed:
            return self.columns.t(), self.rows
        return self.rows.t(), self.columns


class DeferredWeightGrads:
    """Deferred weight gradients of one backward. Their inputs are held until they are computed."""

    def __init__(self) -> None:
        self._products: list[WeightGradient] = []

    def add(self, product: WeightGradient) -> None:
        self._products.append(product)

    def __len__(self) -> int:
        return len(self._products)

    @torch.no_grad()
    def computed(self, place: GradientBuffer | None = None) -> tuple[list[Tensor], list[Tensor]]:
        """Compute all gradients, and release their inputs.

        Args:
            place: gradients for which it returns a buffer are added in place.

        Returns:
            the other gradients: (leaves, gradients).
        """
        products, self._products = self._products, []
        left = [p for p in products if place is None or not p.added(place)]
        return [p.leaf for p in left], [p.computed() for p in left]


@contextmanager
def putting_off() -> Iterator[DeferredWeightGrads]:
    """Defer weight gradients of backwards inside the context to the yielded `DeferredWeightGrads`."""
    global _put_off
    before, _put_off = _put_off, DeferredWeightGrads()
    try:
        yield _put_off
    finally:
        _put_off = before


@contextmanager
def adding_in(place: GradientBuffer | None) -> Iterator[None]:
    """Add weight gradients of backwards inside the context in place, where `place` returns a buffer."""
    global _place
    before, _place = _place, place
    try:
        yield
    finally:
        _place = before


def taken(product: WeightGradient) -> bool:
    """Defer a gradient, or add it in place; return False if it has to be returned to autograd instead."""
    if not product.leaf.is_leaf:
        return False
    if _put_off is not None:
        _put_off.add(product)
        return True
    return _place is not None and product.added(_place)
