"""`Snapshot`: copies in host memory of what a checkpoint will hold, so that training goes on while it is written.

[Note: what may be copied later]
Weights and the optimizer's state change in optimizer steps alone, where no script touches them. Copying gigabytes
takes as long as a forward does, so those are copied by the thread that will write them, beside the forward and
backward of the next step; the step itself waits for that (`Saver.let_change`). All else, such as a BatchNorm's running
mean or a random state, changes at any time and is copied at once. So is what rests on a disk: the buffers that it is
read into belong to the main thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from launcher.checkpoint.slices import FlatSlice
from launcher.models.host_copies import recorded

STEADY = "model/", "optimizer/"
"""Names that begin so are of what an optimizer step alone changes."""


class Snapshot:
    """Host memory for copies of this rank's part of the state. The next checkpoint uses the same memory again.

    Under CUDA it is page-locked, and a stream of its own copies.
    """

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    def begin(
        self, tensors: Mapping[str, Tensor | FlatSlice], *, later: bool
    ) -> Callable[[], dict[str, Tensor | FlatSlice]]:
        """Copy what changes at any time. Return what copies the rest, in any thread, and gives all copies.

        Args:
            later: weights and the optimizer's state stay as they are until all is copied; False: copy them, too.
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
    """Work on a new stream that waits for an event; without one, on that of the thread. A thread begins on the first
    GPU, whichever its process uses."""
    if ready is None:
        yield
        return
    with torch.cuda.device(device):
        stream = torch.cuda.Stream(device)
        stream.wait_event(ready)
        with torch.cuda.stream(stream):
            yield
