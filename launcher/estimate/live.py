"""Bytes of tensors that are alive, counted as operations make them and as the last reference to them goes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes:
    """Bytes of storages on one type of device.

    Args:
        device_type: "cpu", "cuda" or "meta"; tensors elsewhere are not counted.
        phase: asked at every new peak for a word that says when it was.

    Attributes:
        now: bytes alive; peak: the most since `restart`; phase_of_peak: when that was.
    """

    def __init__(self, device_type: str = "cpu", phase: Callable[[], str] = lambda: "") -> None:
        self.device_type, self._phase = device_type, phase
        self.now = self.peak = 0
        self.phase_of_peak = ""
        self._known: weakref.WeakKeyDictionary[Any, _Size] = weakref.WeakKeyDictionary()

    def restart(self) -> None:
        """Forget the peak: the next one is looked for from here on."""
        self.peak, self.phase_of_peak = self.now, self._phase()

    def note(self, tensor: Tensor) -> None:
        """Count the memory of a tensor, if it is new, or has another size than before."""
        if tensor.device.type != self.device_type:
            return
        storage = tensor.untyped_storage()
        size = self._known.get(storage)
        if size is None:
            size = self._known[storage] = _Size()
            weakref.finalize(storage, self._gone, size).atexit = False
        self.now += storage.nbytes() - size.nbytes
        size.nbytes = storage.nbytes()
        if self.now > self.peak:
            self.peak, self.phase_of_peak = self.now, self._phase()

    def note_all(self, made: object) -> None:
        """Count all tensors in what an operation gave."""
        if isinstance(made, Tensor):
            self.note(made)
        elif isinstance(made, (Sequence, Mapping)):
            for leaf in tree_leaves(made):
                if isinstance(leaf, Tensor):
                    self.note(leaf)

    def _gone(self, size: _Size) -> None:
        self.now -= size.nbytes


class _Size:
    """Of a storage, when it was seen last."""

    def __init__(self) -> None:
        self.nbytes = 0


class Counting(TorchDispatchMode):
    """Inside, every operation runs as ever, and `live` sees what it makes.

    Args:
        live: the count.
    """

    def __init__(self, live: LiveBytes) -> None:
        super().__init__()
        self.live = live

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = self.run(func, args, kwargs or {})
        self.live.note_all(made)
        return made

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The operation itself."""
        return func(*args, **kwargs)
