"""What a machine without GPUs says when programs ask for them."""

import os
from typing import Any


def no_devices(torch: Any) -> None:
    """A program that asks for CUDA devices by name gets the CPU."""
    real = torch.device

    class Kind(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, real)

    class Device(metaclass=Kind):
        def __new__(cls, kind: Any = "cpu", *index: Any) -> Any:
            return real("cpu") if str(kind).startswith("cuda") else real(kind, *index)

    def set_device(*arguments: Any) -> None: ...

    def synchronize(*arguments: Any) -> None: ...

    def device_count() -> int:
        return 1

    torch.device = Device
    for function in (set_device, synchronize, device_count):
        setattr(torch.cuda, function.__name__, function)


def two_accelerators(testing: Any) -> None:
    """Tests that ask for accelerators, and need none, are run. `testing` is where a library has its decorators."""
    for name in (
        "require_non_cpu",
        "require_multi_device",
        "require_torch_accelerator",
        "require_torch_multi_accelerator",
    ):
        if hasattr(testing, name):
            setattr(testing, name, lambda case: case)
    testing.backend_device_count = lambda device: 2


def half_precision(deepspeed: Any) -> None:
    """DeepSpeed asks whether the CPU has instructions for fp16 before it trains in it; torch computes without them."""
    type(deepspeed.accelerator.get_accelerator()).is_fp16_supported = lambda self: True


def gloo(state: Any) -> None:
    """accelerate looks for a backend among accelerators, and believes in one process where it finds none."""
    prepare = state.PartialState._prepare_backend

    def prepared(self: Any, cpu: bool = False, *arguments: Any, **keywords: Any) -> tuple[str | None, Any]:
        backend, kind = prepare(self, cpu, *arguments, **keywords)
        return backend or ("gloo" if "LOCAL_RANK" in os.environ and not cpu else None), kind

    state.PartialState._prepare_backend = prepared
