"""`Snapshot`: copies of the state in host memory, so that training continues while the checkpoint is written.

[Note: what may be copied later]
Unless the script modifies them, weights and optimizer state change only in optimizer steps. Copying gigabytes
takes as long as a forward pass, so the thread that writes them copies them while the next forward and
backward run; the optimizer step waits for the copy (`Saver.let_change`). Everything else, such as a
BatchNorm's running mean or a random state, can change at any time and is copied immediately. So is state that
is offloaded to disk, because the buffers that it is read into belong to the main thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from launcher.checkpoint.slices import FlatSlice
from launcher.models.host_copies import recorded

STEADY = "model/", "optimizer/"
"""Name prefixes of the tensors that only an optimizer step changes."""


class Snapshot:
    """Host memory for copies of this rank's part of the state, reused by the next checkpoint.

    Under CUDA the memory is pinned, and deferred copies run on a separate stream.
    """

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    def begin(
        self, tensors: Mapping[str, Tensor | FlatSlice], *, later: bool
    ) -> Callable[[], dict[str, Tensor | FlatSlice]]:
        """Copy the tensors that can change at any time.

        Return a function that copies the rest, in any thread, and returns all copies.

        Args:
            later: weights and optimizer state do not change until everything is copied, so defer their
                copies; False: copy them now, too.
        """
        waiting = {name: tensor for name, tensor in tensors.items() if later and _is_steady(name, tensor)}
        copies = {name: self._copy(name, tensor) for name, tensor in tensors.items() if name not in waiting}
        device = next((tensor.device for tensor in waiting.values() if tensor.device.type == "cuda"), None)
        ready = None if device is None else recorded(device)

        def finish() -> dict[str, Tensor | FlatSlice]:
            with _stream_after(ready, device):
                rest = {name: self._copy(name, tensor) for name, tensor in waiting.items()}
            return {name: rest[name] if name in rest else copies[name] for name in tensors}

        return finish

    def _copy(self, name: str, tensor: Tensor | FlatSlice) -> Tensor | FlatSlice:
        source = tensor.data_1d if isinstance(tensor, FlatSlice) else tensor.detach()
        memory = self._memory.get(name)
        if memory is None or memory.shape != source.shape or memory.dtype != source.dtype:
            pins = source.device.type == "cuda"
            memory = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=pins)
            self._memory[name] = memory
        memory.copy_(source)
        return tensor.with_data(memory) if isinstance(tensor, FlatSlice) else memory


def _is_steady(name: str, tensor: Tensor | FlatSlice) -> bool:
    return name.startswith(STEADY) and isinstance(tensor, FlatSlice) and tensor.in_memory


@contextmanager
def _stream_after(ready: torch.cuda.Event | None, device: torch.device | None) -> Iterator[None]:
    """Use a new stream that waits for an event; without an event, the thread's current stream.

    The device is set explicitly, because a new thread starts on the first GPU, whichever its process uses.
    """
    if ready is None:
        yield
        return
    with torch.cuda.device(device):
        stream = torch.cuda.Stream(device)
        stream.wait_event(ready)
        with torch.cuda.stream(stream):
            yield
