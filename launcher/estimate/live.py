"""Counts the bytes of live tensors, as operations create them and as their last references are dropped."""

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
        at_new_peak: called at each new peak.
        device_type: "cpu", "cuda" or "meta"; tensors on other devices are not counted.

    Attributes:
        now: live bytes; peak: maximum since `restart`.
        host: live bytes that were marked as host memory, and are not in `now`; host_peak: their maximum.
    """

    def __init__(self, at_new_peak: Callable[[], None] = lambda: None, device_type: str = "cpu") -> None:
        self._at_new_peak, self.device_type = at_new_peak, device_type
        self.now = self.peak = self.host = self.host_peak = 0
        self._known: weakref.WeakKeyDictionary[Any, _Size] = weakref.WeakKeyDictionary()

    def restart(self) -> None:
        """Reset the peak to the current value."""
        self.peak = self.now

    def note(self, tensor: Tensor) -> None:
        """Count the storage of a tensor if it is new or has changed its size."""
        if tensor.device.type != self.device_type:
            return
        storage = tensor.untyped_storage()
        size = self._known.get(storage) or self._new(storage)
        if size.on_host:
            return
        self.now += storage.nbytes() - size.nbytes
        size.nbytes = storage.nbytes()
        if self.now > self.peak:
            self.peak = self.now
            self._at_new_peak()

    def note_host(self, tensor: Tensor) -> Tensor:
        """Count the storage of a tensor as host memory from now on; return the tensor."""
        storage = tensor.untyped_storage()
        size = self._known.get(storage) or self._new(storage)
        if not size.on_host:
            self.now -= size.nbytes
            size.on_host, size.nbytes = True, storage.nbytes()
            self.host += size.nbytes
            self.host_peak = max(self.host_peak, self.host)
        return tensor

    def note_all(self, made: object) -> None:
        """Count all tensors in the result of an operation."""
        if isinstance(made, Tensor):
            self.note(made)
        elif isinstance(made, (Sequence, Mapping)):
            for leaf in tree_leaves(made):
                if isinstance(leaf, Tensor):
                    self.note(leaf)

    def _new(self, storage: Any) -> _Size:
        size = self._known[storage] = _Size()
        weakref.finalize(storage, self._gone, size).atexit = False
        return size

    def _gone(self, size: _Size) -> None:
        if size.on_host:
            self.host -= size.nbytes
        else:
            self.now -= size.nbytes


class _Size:
    """The size of a storage when it was last counted."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.on_host = False


class LiveBytesMode(TorchDispatchMode):
    """Runs all operations inside the context as usual and counts the tensors that they create.

    Args:
        live: the counter.
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
        """Run an operation; subclasses may replace it."""
        return func(*args, **kwargs)
