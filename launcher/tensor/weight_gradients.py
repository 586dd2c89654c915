"""The place and time at which linear layers compute the gradients of their weights.

At once, and autograd adds them up: what happens outside of everything here. Later (Qi et al. 2023, arXiv:2401.10241):
a backward computes the gradients of inputs only, and leaves those of weights to `DeferredWeightGrads`. In place: where
gradients of microbatches are only added up, the product is added to the sum as it is computed, without being a tensor
of its own; autograd, and hooks that wait for it, do not see it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from launcher.models.gradients import put_gradient

# leaf -> what its gradient is added to: leaf.grad, or where that is to lie; None: it must go through autograd
GradientBuffer = Callable[[Tensor], Tensor | None]

_put_off: DeferredWeightGrads | None = (
    None  # no ContextVar: autograd runs backwards on GPUs in threads of its own
)
_place: GradientBuffer | None = None


@dataclass(frozen=True, slots=True)
class WeightGradient:
    """The gradient of a weight, before it is computed.

    Args:
        leaf: [out, in]; `transposed`: [in, out].
        rows: gradients of outputs [tokens, out].
        columns: inputs [tokens, in].
    """

    leaf: Tensor
    rows: Tensor
    columns: Tensor
    transposed: bool

    def computed(self) -> Tensor:
        """Return the gradient, shaped like the leaf."""
        left, right = self._factors
        return (left @ right).to(self.leaf.dtype)

    def added(self, place: GradientBuffer) -> bool:
        """Add it to what the leaf has; false: it has to go through autograd."""
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
    """Weight gradients of one backward that are still to be computed. Their inputs are held until then."""

    def __init__(self) -> None:
        self._products: list[WeightGradient] = []

    def add(self, product: WeightGradient) -> None:
        self._products.append(product)

    def __len__(self) -> int:
        return len(self._products)

    @torch.no_grad()
    def computed(self, place: GradientBuffer | None = None) -> tuple[list[Tensor], list[Tensor]]:
        """Compute all; what is held is let go.

        Args:
            place: those that have one are added there.

        Returns:
            the others: (leaves, their gradients).
        """
        products, self._products = self._products, []
        left = [p for p in products if place is None or not p.added(place)]
        return [p.leaf for p in left], [p.computed() for p in left]


@contextmanager
def putting_off() -> Iterator[DeferredWeightGrads]:
    """Inside, backwards leave weight gradients to what this gives."""
    global _put_off
    before, _put_off = _put_off, DeferredWeightGrads()
    try:
        yield _put_off
    finally:
        _put_off = before


@contextmanager
def adding_in(place: GradientBuffer | None) -> Iterator[None]:
    """Inside, backwards add weight gradients in place, where they have one."""
    global _place
    before, _place = _place, place
    try:
        yield
    finally:
        _place = before


def taken(product: WeightGradient) -> bool:
    """Return whether a gradient is put off, or was added in place; else its layer computes it for autograd."""
    if not product.leaf.is_leaf:
        return False
    if _put_off is not None:
        _put_off.add(product)
        return True
    return _place is not None and product.added(_place)
