"""`Snapshot`: copies in host memory of what a checkpoint will hold, so that training goes on while it is written.

[Note: what may be copied later]
Weights and the optimizer's state change in optimizer steps alone, where no script touches them. Copying gigabytes
takes as long as a forward does, so those are copied by the thread that will write them, beside the forward and
backward of the next step; the step itself waits for that (`Saver.let_change`). All else, such as a BatchNorm's running
mean or a random state, changes at any time and is copied at once. So is what rests on a disk: the buffers that it is
read into belong to the main thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from launcher.checkpoint.slices import FlatSlice

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
        on_device = any(tensor.device.type == "cuda" for tensor in waiting.values())
        ready = torch.cuda.current_stream().record_event() if on_device else None

        def finish() -> dict[str, Tensor | FlatSlice]:
            with _stream_after(ready):
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


def _stream_after(ready: Any) -> Any:
    """Return the context of a new stream that waits for an event; without one, of nothing."""
    if ready is None:
        return nullcontext()
    stream = torch.cuda.Stream()
    stream.wait_event(ready)
    return torch.cuda.stream(stream)
