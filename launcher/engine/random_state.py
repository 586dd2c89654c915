"""This rank's random states (torch, CUDA, Python, NumPy) as tensors for a checkpoint."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

NO_GAUSS = float("nan")  # Python's generator may cache a second normal value


def random_states(rank: str, device: torch.device) -> dict[str, Tensor]:
    """Return name -> state. Random states belong to ranks, so names end with `rank`: the dp rank and the
    pipeline stage. The ranks of a tp group draw the same numbers."""
    _, numbers, gauss = random.getstate()
    legacy: Any = np.random.get_state(legacy=False)
    words = [*legacy["state"]["key"], legacy["state"]["pos"], legacy["has_gauss"], legacy["gauss"]]
    states = {
        f"rng/{rank}": torch.get_rng_state(),
        # fp64 represents their 32-bit integers exactly
        f"rng_python/{rank}": torch.tensor(
            [*numbers, NO_GAUSS if gauss is None else gauss], dtype=torch.float64
        ),
        f"rng_numpy/{rank}": torch.tensor([float(word) for word in words], dtype=torch.float64),
    }
    if device.type == "cuda":
        states[f"rng_cuda/{rank}"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_states(states: dict[str, Tensor], device: torch.device) -> None:
    """Restore the states from `random_states`; kinds that are missing stay unchanged."""
    for name, state in states.items():
        kind = name.partition("/")[0]
        if kind == "rng":
            torch.set_rng_state(state)
        elif kind == "rng_cuda":
            torch.cuda.set_rng_state(state, device)
        elif kind == "rng_python":
            *numbers, gauss = state.tolist()
            random.setstate((3, tuple(int(n) for n in numbers), None if gauss != gauss else gauss))
        elif kind == "rng_numpy":
            *words, position, has_gauss, gauss = state.tolist()
            key = np.array([int(word) for word in words], dtype=np.uint32)
            np.random.set_state(("MT19937", key, int(position), int(has_gauss), gauss))
