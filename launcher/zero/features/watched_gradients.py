"""Checksums of gradients, for a step that is computed twice (`replica_check.replay_every`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from launcher.zero.features.replicas import checksums, digests
from launcher.zero.gradients import FlatGradient

T = TypeVar("T")


class _Watched:
    """Records checksums of a gradient before each reduction, and forwards to the previous inspector."""

    def __init__(self, gradient: FlatGradient) -> None:
        self._gradient, self.before = gradient, gradient.inspector
        self.noted: list[Tensor] = []

    def look(self, full: Tensor) -> None:
        self.noted.append(checksums([full[slot.span] for slot in self._gradient.flat.slots]))
        if self.before is not None:
            self.before.look(full)

    def clear(self) -> None:
        if self.before is not None:
            self.before.clear()


class WatchedGradients:
    """Records checksums of this rank's gradients and of its shares of their sums, inside the `with`."""

    def __init__(self, gradients: Sequence[FlatGradient]) -> None:
        self._all = [(gradient, _Watched(gradient)) for gradient in gradients]

    def __enter__(self) -> WatchedGradients:
        for gradient, watched in self._all:
            gradient.inspector = watched
        return self

    def __exit__(self, *raised: object) -> None:
        for gradient, watched in self._all:
            gradient.inspector = watched.before

    def bits(
        self, run: Callable[[], tuple[Tensor, T]], flush: Callable[[], None]
    ) -> tuple[dict[str, list[int]], tuple[Tensor, T]]:
        """Return (name -> checksums of the values computed in `run`, the result of `run`); the losses are
        included.

        Args:
            run: computes gradients, and returns the losses first.
            flush: completes the reductions.
        """
        result = run()
        flush()
        found = {"the loss": digests([result[0]])}
        for gradient, watched in self._all:
            columns = (
                torch.stack(watched.noted).T.tolist() if watched.noted else [[]] * len(gradient.flat.slots)
            )
            for slot, column in zip(gradient.flat.slots, columns, strict=True):
                found[f"the gradient of {slot.name}"] = column
            found[f"the reduced gradient of {gradient.flat.name}"] = (
                digests([gradient.share]) if gradient.kept else []
            )
            gradient.rest(changed=False)
            watched.noted = []
        return found, result
