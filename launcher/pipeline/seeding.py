"""Seeds the random numbers of a single layer, and restores the random state afterwards."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def number_of(seed: int, index: int) -> int:
    """Return a seed for the layer `index`, unrelated to those of other layers and seeds; 0 .. 2**31 - 1."""
    digest = hashlib.sha256(f"{seed}:{index}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


@contextmanager
def drawn_from(number: int, seed_fn: Callable[[int], Any] | None = None) -> Iterator[None]:
    """Seed Python, numpy and torch with `number` inside the context; restore their random states on exit.

    Args:
        seed_fn: called with `number` instead of the default seeding.
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=devices):
        try:
            (seed_fn or _seed)(number)
            yield
        finally:
            random.setstate(python)
            np.random.set_state(of_numpy)


def _seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number % 2**32)
    # Not torch.manual_seed, which would reseed every other device as well.
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(number)
