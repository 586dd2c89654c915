"""`deepspeed.accelerator`: DeepSpeed's accelerator API for the device of this rank, a CUDA GPU or the CPU.

On a CPU, memory figures are those of this process, and streams have no effect because every call is
synchronous.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from copy import copy
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from launcher.integrations.refused import NotHere, missing
from launcher.monitor.memory import current_memory_bytes, peak_memory_bytes

if TYPE_CHECKING:
    from launcher.integrations.builders import OpBuilder

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
    """A no-op stream for a device without streams: work is complete when the call returns."""

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
    """An event on a device without streams, timed with the host clock."""

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
        """Return the milliseconds between two recorded events."""
        if self._at is None or end._at is None:
            raise RuntimeError("an event was not recorded; call record() on both")
        return (end._at - self._at) * 1e3


def _nothing(*given: Any, **more: Any) -> None:
    """Do nothing: a CPU does not need this call."""


def _ranks_here() -> int:
    """Return the number of ranks on this node: scripts assert that it does not exceed the device count."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1")


def _used(device_index: int | None = None) -> int:
    return current_memory_bytes()


def _most_used(device_index: int | None = None) -> int:
    return peak_memory_bytes(torch.device("cpu"))


ANSWERS: Mapping[str, Any] = {
    "get_compile_backend": "inductor",
    "is_available": True,
    "is_fp16_supported": True,
    "is_fp64_supported": True,
    "is_triton_supported": False,
    "pin_memory_alignment": PAGE,
    "prefer_triton_grouped_mm": False,
    "supports_nvtx_domain": False,
    "visible_devices_envs": ["CUDA_VISIBLE_DEVICES"],
}
"""Function name -> the constant that it returns on every device."""

ON_CPU: Mapping[str, Any] = {
    "Event": HostEvent,
    "Stream": HostStream,
    "capture_to_graph": lambda graph, pool=None, stream=None: nullcontext(),
    "create_graph": _nothing,
    "current_device": lambda: 0,
    "current_stream": lambda device_index=None: HostStream(),
    "default_stream": lambda device_index=None: HostStream(),
    "device": lambda device_index=None: nullcontext(),
    "device_count": _ranks_here,
    "empty_cache": _nothing,
    "initial_seed": lambda seed=None: torch.initial_seed(),
    "is_bf16_supported": lambda: True,
    "is_current_stream_capturing": lambda: False,
    "lazy_call": lambda callback: callback(),
    "manual_seed": torch.manual_seed,
    "manual_seed_all": torch.manual_seed,
    "max_memory_allocated": _most_used,
    "max_memory_cached": _most_used,
    "max_memory_reserved": _most_used,
    "memory_allocated": _used,
    "memory_cached": _used,
    "memory_reserved": _used,
    "reset_max_memory_allocated": _nothing,
    "reset_max_memory_cached": _nothing,
    "reset_peak_memory_stats": _nothing,  # the OS tracks the peak of the process and cannot reset it
    "set_device": _nothing,
    "stream": lambda stream: nullcontext(),
    "synchronize": _nothing,
}
"""Name -> its CPU implementation. A GPU uses the torch.cuda attribute, whose name `IN_TORCH` may override."""

KINDS = ("Event", "Stream")
"""The names that are classes."""

IN_TORCH: Mapping[str, str] = {
    "capture_to_graph": "graph",
    "create_graph": "CUDAGraph",
    "lazy_call": "_lazy_call",
    "max_memory_cached": "max_memory_reserved",
    "memory_cached": "memory_reserved",
    "reset_max_memory_allocated": "reset_peak_memory_stats",
    "reset_max_memory_cached": "reset_peak_memory_stats",
}


class Accelerator:
    """The accelerator of this rank. Names without a method are looked up in the tables above."""

    @property
    def _name(self) -> str:
        return _kind()

    @property
    def _communication_backend_name(self) -> str:
        return self.communication_backend_name()

    # ---- device ---------------------------------------------------------------------------------

    def device_name(self, device_index: int | str | None = None) -> str:
        kind = _kind()
        return kind if device_index is None or kind == "cpu" else f"{kind}:{device_index}"

    def current_device_name(self) -> str:
        return f"{CUDA}:{torch.cuda.current_device()}" if _kind() == CUDA else "cpu"

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

    # ---- capabilities ---------------------------------------------------------------------------

    def supported_dtypes(self) -> list[torch.dtype]:
        dtypes = [torch.float32, torch.float16, torch.bfloat16]
        return dtypes if self.is_bf16_supported() else dtypes[:2]

    def is_synchronized_device(self) -> bool:
        return _kind() == "cpu"

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def communication_backend_name(self) -> str:
        return "nccl" if _kind() == CUDA else "gloo"

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: list[int]) -> None:
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    def export_envs(self) -> list[str]:
        return ["NCCL", "LD_LIBRARY", "PATH"] if _kind() == CUDA else []

    def get_op_builder(self, class_name: str) -> type[OpBuilder] | None:
        """Return the builder class of that name, or None if its operator is not available."""
        from launcher.integrations.builders import BUILDERS

        kind = BUILDERS.get(class_name)
        return kind if kind is not None and kind().is_compatible() else None

    def create_op_builder(self, class_name: str) -> OpBuilder | None:
        """Return a builder of that name, or None if its operator is not available."""
        kind = self.get_op_builder(class_name)
        return None if kind is None else kind()

    # ---- random numbers -------------------------------------------------------------------------

    def random(self) -> ModuleType:
        """Return the torch module with the random generators of this device."""
        return torch.cuda.random if _kind() == CUDA else torch.random

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

    # ---- graphs ---------------------------------------------------------------------------------

    def replay_graph(self, graph: Any) -> None:
        """Run a captured graph again.

        Raises:
            NotHere: on a CPU. Nothing was captured there, so a silent no-op would skip the work.
        """
        if _kind() != CUDA:
            raise NotHere(
                "replay_graph() is not available on CPU: no graph was captured",
                where="get_accelerator()",
                fix="call the function directly if get_accelerator().device_name() is cpu",
            )
        graph.replay()

    # ---- memory ---------------------------------------------------------------------------------

    def memory_stats(self, device_index: int | None = None) -> dict[str, int]:
        if _kind() == CUDA:
            return dict(torch.cuda.memory_stats(device_index))
        now, most = self.memory_allocated(), self.max_memory_allocated()
        return {"allocated_bytes.all.current": now, "allocated_bytes.all.peak": most}

    def pin_memory(self, tensor: Tensor, align_bytes: int = 1, **others: Any) -> Tensor:
        """Return the tensor in pinned memory, or unchanged if there is no GPU."""
        return tensor.pin_memory() if _kind() == CUDA else tensor

    def pin_empty(self, *size: Any, **others: Any) -> Tensor:
        options = {key: value for key, value in others.items() if key in ("dtype", "requires_grad")}
        return torch.empty(*size, pin_memory=_kind() == CUDA, **options)

    def pin_empty_like(self, tensor: Tensor, **others: Any) -> Tensor:
        return self.pin_empty(tensor.shape, dtype=tensor.dtype)

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.is_pinned() if _kind() == CUDA else False

    def unpin_memory(self, tensor: Tensor) -> None:
        """Do nothing: torch frees pinned memory together with its tensor."""

    # ---- profiles -------------------------------------------------------------------------------

    def range_push(self, msg: str, **others: Any) -> None:
        """Begin an NVTX range; does nothing on a CPU, where only torch.profiler ranges are recorded."""
        if _kind() == CUDA:
            torch.cuda.nvtx.range_push(msg)

    def range_pop(self, **others: Any) -> None:
        if _kind() == CUDA:
            torch.cuda.nvtx.range_pop()

    def __getattr__(self, name: str) -> Any:
        if name in ANSWERS:
            return partial(copy, ANSWERS[name])
        if name in ON_CPU:
            return _on_cuda(name) if _kind() == CUDA else ON_CPU[name]
        if name in TENSORS:
            return partial(torch.tensor, dtype=TENSORS[name], device=_kind())
        what, how = missing(f"{NAME}.{name}", f"get_accelerator().{name}")
        raise NotHere(what, **how)


DeepSpeedAccelerator = Accelerator
_ACCELERATOR = Accelerator()


def get_accelerator() -> Accelerator:
    """Return the accelerator of this rank."""
    return _ACCELERATOR


def set_accelerator(accel_obj: Any) -> None:
    """Reject any accelerator other than the built-in one.

    Raises:
        NotHere: `accel_obj` is not the built-in accelerator.
    """
    if accel_obj is not _ACCELERATOR:
        what, how = missing("accelerator.set_accelerator", "set_accelerator() with a custom accelerator")
        raise NotHere(what, **how)


def is_current_accelerator_supported() -> bool:
    return True


def _on_cuda(name: str) -> Any:
    found = getattr(torch.cuda, IN_TORCH.get(name, name))
    return found if name in KINDS else partial(_call, found)


def _call(function: Callable[..., Any], *given: Any, device_index: int | None = None, **more: Any) -> Any:
    """Call a torch.cuda function; the index is positional because torch.cuda names it `device`."""
    return function(*given, **more) if device_index is None else function(device_index, **more)


def _kind() -> str:
    return CUDA if torch.cuda.is_available() else "cpu"
