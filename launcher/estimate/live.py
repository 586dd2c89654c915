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
        at_new_peak: called at each.
        device_type: "cpu", "cuda" or "meta"; tensors elsewhere are not counted.

    Attributes:
        now: bytes alive; peak: the most since `restart`.
        host: bytes alive that were said to be host memory, and do not count; host_peak: the most of them.
    """

    def __init__(self, at_new_peak: Callable[[], None] = lambda: None, device_type: str = "cpu") -> None:
        self._at_new_peak, self.device_type = at_new_peak, device_type
        self.now = self.peak = self.host = self.host_peak = 0
        self._known: weakref.WeakKeyDictionary[Any, _Size] = weakref.WeakKeyDictionary()

    def restart(self) -> None:
        """Forget the peak: the next one is looked for from here on."""
        self.peak = self.now

    def note(self, tensor: Tensor) -> None:
        """Count the memory of a tensor, if it is new, or has another size than before."""
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
        """Count this memory from now on as memory of the host; return the tensor."""
        storage = tensor.untyped_storage()
        size = self._known.get(storage) or self._new(storage)
        if not size.on_host:
            self.now -= size.nbytes
            size.on_host, size.nbytes = True, storage.nbytes()
            self.host += size.nbytes
            self.host_peak = max(self.host_peak, self.host)
        return tensor

    def note_all(self, made: object) -> None:
        """Count all tensors in what an operation gave."""
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
    """The size of a storage, when it was seen last."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.on_host = False


class LiveBytesMode(TorchDispatchMode):
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
        """Return the operation itself."""
        return func(*args, **kwargs)
