"""Weight gradients that are put off (Qi et al. 2023, arXiv:2401.10241): a backward that computes the gradients of
inputs only, and leaves those of the weights for later.

Linear layers ask `put_off` in their backward. Outside of `putting_off` it says no, and they compute both at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

Compute = Callable[[], Tensor]

_put_off: PutOff | None = None  # no ContextVar: autograd runs backwards on GPUs in threads of its own


class PutOff:
    """Weight gradients of one backward that are still to be computed. Their inputs are held until then."""

    def __init__(self) -> None:
        self._work: list[tuple[Tensor, Compute]] = []

    def add(self, leaf: Tensor, compute: Compute) -> None:
        self._work.append((leaf, compute))

    def __len__(self) -> int:
        return len(self._work)

    def computed(self) -> tuple[list[Tensor], list[Tensor]]:
        """(leaves, their gradients); what is held is let go."""
        work, self._work = self._work, []
        with torch.no_grad():
            return [leaf for leaf, _ in work], [compute() for _, compute in work]


@contextmanager
def putting_off() -> Iterator[PutOff]:
    """Inside, backwards leave weight gradients to what this gives."""
    global _put_off
    before, _put_off = _put_off, PutOff()
    try:
        yield _put_off
    finally:
        _put_off = before


def put_off(leaf: Tensor, compute: Compute) -> bool:
    """Whether the gradient of a leaf is computed later; `compute` is called then."""
    if _put_off is None or not leaf.is_leaf:
        return False
    _put_off.add(leaf, compute)
    return True
