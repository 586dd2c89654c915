"""Older versions of a rank's weights, kept in addition to the newest (weight stashing).

The newest version is always in the flat buffers, where the optimizer steps it and checkpoints read it. Older
versions are copies, made right before an update and only if they are needed again. The module computes with
one version at a time: its leaves are views of the buffers or of a copy, and tensors that autograd has saved
of the weights are unpacked from the version shown at that moment (`saved_tensors.py`). A backward thus uses
the weights of its forward, even if updates happened in between.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from launcher.zero.model import ZeroModel


class Versions:
    """Versions of the trainable parameters, numbered by updates. Parameters must not be sharded.

    Attributes:
        newest: the number of the newest version.
        most: the maximum number of versions held at once, including the newest.
    """

    def __init__(self, zero: ZeroModel) -> None:
        self.pool, self.flats = zero.pool, [gradient.flat for gradient in zero.gradients]
        self.newest, self.most = 0, 1
        self._shown = 0
        self._older: dict[int, list[Tensor]] = {}
        self._own: list[Tensor] = []
        for flat in self.flats:
            assert flat.full is not None, "parameters are whole between steps"
            self._own.append(flat.full)
            self.pool.occupants[flat.full.untyped_storage()._cdata] = flat
        zero.hooks.packing.enabled = True

    def show(self, number: int) -> None:
        """Switch the module to a version. A number before the oldest kept version selects that one: at the
        start of a run, and after `forget`, only the newest exists."""
        number = max(number, min(self._older, default=self.newest))
        if number == self._shown:
            return
        values = self._own if number == self.newest else self._older[number]
        for flat, whole in zip(self.flats, values, strict=True):
            flat.full = whole
            flat.attach()
        self._shown = number

    def advance(self, needed: Collection[int]) -> None:
        """Show the newest version, which is about to be updated, and keep a copy of it if it is `needed`
        again.

        Args:
            needed: the versions that will be shown again. Others are dropped.
        """
        self.show(self.newest)
        self._drop(set(self._older) - set(needed))
        if self.newest in needed:
            copies = [self.pool.take(flat.numel, flat.dtype) for flat in self.flats]
            self._older[self.newest] = [copy.copy_(own) for copy, own in zip(copies, self._own, strict=True)]
        self.newest += 1
        self._shown = self.newest
        self.most = max(self.most, 1 + len(self._older))

    def forget(self) -> None:
        """Drop all versions except the newest."""
        self.show(self.newest)
        self._drop(set(self._older))

    @property
    def held_bytes(self) -> int:
        """Return the bytes of the older versions."""
        return sum(t.numel() * t.element_size() for version in self._older.values() for t in version)

    def _drop(self, numbers: Collection[int]) -> None:
        for number in numbers:
            for copy in self._older.pop(number):
                self.pool.give(copy)
