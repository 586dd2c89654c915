"""`deepspeed.accelerator`: the device of this rank, by DeepSpeed's questions. A CPU answers what has a meaning there.

What it counts on a CPU is memory of this process. A stream or an event of a CPU does nothing: work is done when a
call returns.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from launcher.integrations.builders import BUILDERS, OpBuilder
from launcher.integrations.refused import NotHere, missing
from launcher.monitor.memory import current_memory_bytes, peak_memory_bytes

logger = logging.getLogger("launcher")
CUDA = "cuda"
PAGE = 4096
SUPPORTED_ACCELERATOR_LIST = [CUDA, "cpu"]
NAME = "accelerator.abstract_accelerator.DeepSpeedAccelerator"
TENSORS = {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}


class HostStream:
    """A stream of a device that has none: what is started is done."""

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        event = event or HostEvent()
        event.record()
        return event


class HostEvent:
    """A moment of a device without streams, by the clock of the host."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        self._at: float | None = None

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: HostEvent) -> float:
        """Milliseconds between two moments that were recorded."""
        if self._at is None or end._at is None:
            raise RuntimeError("an event was not recorded; call record() on both")
        return (end._at - self._at) * 1e3


class Accelerator:
    """The device of this rank."""

    @property
    def _name(self) -> str:
        return _kind()

    @property
    def _communication_backend_name(self) -> str:
        return self.communication_backend_name()

    # ---- which device ---------------------------------------------------------------------------

    def device_name(self, device_index: int | str | None = None) -> str:
        kind = _kind()
        return kind if device_index is None or kind == "cpu" else f"{kind}:{device_index}"

    def current_device_name(self) -> str:
        return f"{CUDA}:{torch.cuda.current_device()}" if _kind() == CUDA else "cpu"

    def current_device(self) -> int:
        return torch.cuda.current_device() if _kind() == CUDA else 0

    def device(self, device_index: int | None = None) -> AbstractContextManager[Any]:
        return torch.cuda.device(device_index) if _kind() == CUDA else nullcontext()

    def set_device(self, device_index: int) -> None:
        if _kind() == CUDA:
            torch.cuda.set_device(device_index)

    def device_count(self) -> int:
        """On a CPU the ranks of this machine: scripts assert that there are not more of them than devices."""
        ranks = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1"
        return torch.cuda.device_count() if _kind() == CUDA else int(ranks)

    def is_available(self) -> bool:
        return True

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device.type == _kind()

    def total_memory(self, device_index: int | None = None) -> int:
        if _kind() == CUDA:
            return int(torch.cuda.get_device_properties(device_index or 0).total_memory)
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def available_memory(self, device_index: int | None = None) -> int:
        if _kind() == CUDA:
            return int(torch.cuda.mem_get_info(device_index)[0])
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")

    # ---- what it can do -------------------------------------------------------------------------

    def is_bf16_supported(self) -> bool:
        return torch.cuda.is_bf16_supported() if _kind() == CUDA else True

    def is_fp16_supported(self) -> bool:
        return True

    def is_fp64_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        dtypes = [torch.float32, torch.float16, torch.bfloat16]
        return dtypes if self.is_bf16_supported() else dtypes[:2]

    def is_triton_supported(self) -> bool:
        return False

    def is_synchronized_device(self) -> bool:
        return _kind() == "cpu"

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def supports_nvtx_domain(self) -> bool:
        return False

    def prefer_triton_grouped_mm(self) -> bool:
        return False

    def communication_backend_name(self) -> str:
        return "nccl" if _kind() == CUDA else "gloo"

    def visible_devices_envs(self) -> list[str]:
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: list[int]) -> None:
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    def export_envs(self) -> list[str]:
        return ["NCCL", "LD_LIBRARY", "PATH"] if _kind() == CUDA else []

    def get_compile_backend(self) -> str:
        return "inductor"

    def get_op_builder(self, class_name: str) -> type[OpBuilder] | None:
        """The class of that name; None where what it builds is not here."""
        kind = BUILDERS.get(class_name)
        return kind if kind is not None and kind().is_compatible() else None

    def create_op_builder(self, class_name: str) -> OpBuilder | None:
        """One of them."""
        kind = self.get_op_builder(class_name)
        return None if kind is None else kind()

    # ---- random numbers -------------------------------------------------------------------------

    def random(self) -> ModuleType:
        """The module of torch that has the generators of this device."""
        return torch.cuda.random if _kind() == CUDA else torch.random

    def manual_seed(self, seed: int) -> None:
        torch.cuda.manual_seed(seed) if _kind() == CUDA else torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.cuda.manual_seed_all(seed) if _kind() == CUDA else torch.manual_seed(seed)

    def initial_seed(self, seed: int | None = None) -> int:
        return torch.cuda.initial_seed() if _kind() == CUDA else torch.initial_seed()

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        if _kind() != CUDA:
            return torch.get_rng_state()
        return torch.cuda.get_rng_state() if device_index is None else torch.cuda.get_rng_state(device_index)

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        if _kind() != CUDA:
            torch.set_rng_state(new_state)
        elif device_index is None:
            torch.cuda.set_rng_state(new_state)
        else:
            torch.cuda.set_rng_state(new_state, device_index)

    def default_generator(self, device_index: int = 0) -> torch.Generator:
        return torch.cuda.default_generators[device_index] if _kind() == CUDA else torch.default_generator

    # ---- streams and events ---------------------------------------------------------------------

    @property
    def Stream(self) -> Any:
        return torch.cuda.Stream if _kind() == CUDA else HostStream

    @property
    def Event(self) -> Any:
        return torch.cuda.Event if _kind() == CUDA else HostEvent

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream) if _kind() == CUDA else nullcontext()

    def current_stream(self, device_index: int | None = None) -> Any:
        return torch.cuda.current_stream(device_index) if _kind() == CUDA else HostStream()

    def default_stream(self, device_index: int | None = None) -> Any:
        return torch.cuda.default_stream(device_index) if _kind() == CUDA else HostStream()

    def synchronize(self, device_index: int | None = None) -> None:
        if _kind() == CUDA:
            torch.cuda.synchronize(device_index)

    def lazy_call(self, callback: Callable[[], Any]) -> None:
        """On a GPU when CUDA has been started, else at once."""
        if _kind() == CUDA:
            torch.cuda._lazy_call(callback)
        else:
            callback()

    def create_graph(self) -> Any:
        return torch.cuda.CUDAGraph() if _kind() == CUDA else None

    def capture_to_graph(
        self, graph: Any, pool: Any = None, stream: Any = None
    ) -> AbstractContextManager[Any]:
        return torch.cuda.graph(graph, pool, stream) if _kind() == CUDA else nullcontext()

    def replay_graph(self, graph: Any) -> None:
        """Runs a captured graph again.

        Raises:
            NotHere: on a CPU: nothing was captured, and saying nothing would leave the work out.
        """
        if _kind() != CUDA:
            raise NotHere(
                "replay_graph() has nothing to run again: a CPU captures no graphs",
                where="get_accelerator()",
                fix="call the function itself where get_accelerator().device_name() is cpu",
            )
        graph.replay()

    def is_current_stream_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing() if _kind() == CUDA else False

    # ---- memory ---------------------------------------------------------------------------------

    def empty_cache(self) -> None:
        if _kind() == CUDA:
            torch.cuda.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        return int(torch.cuda.memory_allocated(device_index)) if _kind() == CUDA else current_memory_bytes()

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        if _kind() == CUDA:
            return int(torch.cuda.max_memory_allocated(device_index))
        return peak_memory_bytes(torch.device("cpu"))

    def memory_reserved(self, device_index: int | None = None) -> int:
        return int(torch.cuda.memory_reserved(device_index)) if _kind() == CUDA else current_memory_bytes()

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        if _kind() == CUDA:
            return int(torch.cuda.max_memory_reserved(device_index))
        return peak_memory_bytes(torch.device("cpu"))

    memory_cached, max_memory_cached = memory_reserved, max_memory_reserved

    def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
        if _kind() == CUDA:
            return dict(torch.cuda.memory_stats(device_index))
        now, most = self.memory_allocated(), self.max_memory_allocated()
        return {"allocated_bytes.all.current": now, "allocated_bytes.all.peak": most}

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """On a CPU the system counts the peak of the process, and it stays."""
        if _kind() == CUDA:
            torch.cuda.reset_peak_memory_stats(device_index)

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def pin_memory(self, tensor: Tensor, align_bytes: int = 1, **others: Any) -> Tensor:
        """The tensor in page-locked memory; as it is where there is no GPU to copy to."""
        return tensor.pin_memory() if _kind() == CUDA else tensor

    def pin_empty(self, *size: Any, **others: Any) -> Tensor:
        options = {key: value for key, value in others.items() if key in ("dtype", "requires_grad")}
        return torch.empty(*size, pin_memory=_kind() == CUDA, **options)

    def pin_empty_like(self, tensor: Tensor, **others: Any) -> Tensor:
        return self.pin_empty(tensor.shape, dtype=tensor.dtype)

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.is_pinned() if _kind() == CUDA else False

    def unpin_memory(self, tensor: Tensor) -> None:
        """Page-locked memory of torch's goes with its tensor."""

    def pin_memory_alignment(self) -> int:
        return PAGE

    # ---- profiles -------------------------------------------------------------------------------

    def range_push(self, msg: str, **others: Any) -> None:
        """On a CPU a profile has the ranges of torch.profiler only."""
        if _kind() == CUDA:
            torch.cuda.nvtx.range_push(msg)

    def range_pop(self, **others: Any) -> None:
        if _kind() == CUDA:
            torch.cuda.nvtx.range_pop()

    def __getattr__(self, name: str) -> Any:
        if name in TENSORS:
            return partial(torch.tensor, dtype=TENSORS[name], device=_kind())
        what, how = missing(f"{NAME}.{name}", f"get_accelerator().{name}")
        raise NotHere(what, **how)


DeepSpeedAccelerator = Accelerator
_ACCELERATOR = Accelerator()


def get_accelerator() -> Accelerator:
    """The device of this rank."""
    return _ACCELERATOR


def set_accelerator(accel_obj: Any) -> None:
    """Another one cannot be had.

    Raises:
        NotHere: it is not ours.
    """
    if accel_obj is not _ACCELERATOR:
        what, how = missing("accelerator.set_accelerator", "set_accelerator() with an object of yours")
        raise NotHere(what, **how)


def is_current_accelerator_supported() -> bool:
    return True


def _kind() -> str:
    return CUDA if torch.cuda.is_available() else "cpu"
