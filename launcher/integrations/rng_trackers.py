"""Megatron's RNG state tracker for model-parallel ranks, as provided by `deepspeed.checkpointing`.

The device's default generator draws the same numbers on all ranks of a model-parallel group; inside
`get_cuda_rng_tracker().fork()` each rank draws different ones. Source: Shoeybi et al. 2019, arXiv:1909.08053.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from launcher.errors import LauncherError
from launcher.integrations.accelerator import get_accelerator

_MODEL_PARALLEL_RNG_TRACKER_NAME = "model-parallel-rng"
APART = 2718  # Megatron's offset between the shared seed and the per-rank seeds


class CudaRNGStatesTracker:
    """Named states of the device's random generator."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Remove all states."""
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()

    def get_states(self) -> dict[str, Tensor]:
        return dict(self.states_)

    def set_states(self, states: Mapping[str, Tensor]) -> None:
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Add a state, seeded with `seed`.

        Raises:
            LauncherError: the name or the seed is already in use.
        """
        if seed in self.seeds_ or name in self.states_:
            taken = f"seed {seed}" if seed in self.seeds_ else f"the name {name!r}"
            raise LauncherError(
                f"the RNG tracker already uses {taken}",
                fix="call reset() first, or use another one",
            )
        self.seeds_.add(seed)
        device = get_accelerator()
        before = device.get_rng_state()
        device.manual_seed(seed)
        self.states_[name] = device.get_rng_state()
        device.set_rng_state(before)

    @contextmanager
    def fork(self, name: str = _MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        """Draw random numbers from the state `name` inside the context.

        Raises:
            LauncherError: there is no state with this name.
        """
        if name not in self.states_:
            raise LauncherError(
                f"the RNG tracker has no state named {name!r}",
                fix="call model_parallel_cuda_manual_seed(seed), or add(name, seed), first",
            )
        device = get_accelerator()
        before = device.get_rng_state()
        device.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = device.get_rng_state()
            device.set_rng_state(before)


_CUDA_RNG_STATE_TRACKER = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """Return the tracker of this process."""
    return _CUDA_RNG_STATE_TRACKER


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the default generator equally on all model-parallel ranks, and the tracker's state per rank."""
    _CUDA_RNG_STATE_TRACKER.reset()
    get_accelerator().manual_seed(seed)
    _CUDA_RNG_STATE_TRACKER.add(_MODEL_PARALLEL_RNG_TRACKER_NAME, seed + APART + _rank())


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Reseed the tracker's model-parallel state."""
    _CUDA_RNG_STATE_TRACKER.states_.pop(_MODEL_PARALLEL_RNG_TRACKER_NAME, None)
    _CUDA_RNG_STATE_TRACKER.seeds_.discard(seed + APART + _rank())
    _CUDA_RNG_STATE_TRACKER.add(_MODEL_PARALLEL_RNG_TRACKER_NAME, seed + APART + _rank())


def _set_cuda_rng_state(new_state: Tensor, device: int = -1) -> None:
    get_accelerator().set_rng_state(new_state, None if device == -1 else device)


def _rank() -> int:
    from launcher import checkpointing

    if checkpointing.unit is not None:
        return int(checkpointing.unit.get_model_parallel_rank())
    from launcher.integrations.groups import get_tensor_model_parallel_rank

    return get_tensor_model_parallel_rank()


def detach_variable(inputs: Any, device: Any = None) -> tuple[Any, ...]:
    """Return the inputs with their tensors detached; `requires_grad` is kept."""
    if not isinstance(inputs, tuple):
        raise LauncherError(f"detach_variable() takes a tuple of tensors, not a {type(inputs).__name__}")
    found = []
    for item in inputs:
        if isinstance(item, Tensor):
            fresh = item.detach().to(device) if device is not None else item.detach()
            found.append(fresh.requires_grad_(item.requires_grad))
        else:
            found.append(item)
    return tuple(found)


def extract_tensors(all_objects: Any) -> tuple[Any, Any, tuple[bool, ...]]:
    """Return the tensors, the other objects, and for each object whether it is a tensor."""
    flags = tuple(isinstance(item, Tensor) for item in all_objects)
    tensors = [item for item in all_objects if isinstance(item, Tensor)]
    others = [item for item in all_objects if not isinstance(item, Tensor)]
    kind = type(all_objects) if isinstance(all_objects, list | tuple) else tuple
    return kind(tensors), kind(others), flags


def merge_tensors(tensor_objects: Any, non_tensor_objects: Any, tensor_flags: Any) -> tuple[Any, ...]:
    """Recombine the results of `extract_tensors`."""
    tensors, others = iter(tensor_objects), iter(non_tensor_objects)
    return tuple(next(tensors) if flag else next(others) for flag in tensor_flags)


def get_partition_size(item: Tensor) -> int:
    """Return the number of elements of a tensor that each model-parallel rank stores."""
    degree = _degree()
    if item.numel() % degree:
        raise LauncherError(f"{item.numel()} elements cannot be split over {degree} model-parallel ranks")
    return item.numel() // degree


def get_partition_start(item: Tensor) -> int:
    """Return the index of the first element that this rank stores."""
    return get_partition_size(item) * (_rank() if _degree() > 1 else 0)


def _degree() -> int:
    from launcher import checkpointing

    return 1 if checkpointing.unit is None else int(checkpointing.unit.get_model_parallel_world_size())
