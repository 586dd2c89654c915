"""Bytes of shards by where they rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from launcher.offload.homes import Home
from launcher.zero.flat import FlatBuffer
from launcher.zero.gradients import FlatGradient

Resting = Counter[Home]


def parameters_of(flats: Iterable[FlatBuffer]) -> Resting:
    """What is kept of parameters."""
    held: Resting = Counter()
    for flat in flats:
        held[flat.params_home if flat.sharded else Home(flat.pool.device)] += flat.held_bytes
    return held


def masters_of(flats: Iterable[FlatBuffer]) -> Resting:
    """Master weights that are no parameters."""
    held: Resting = Counter()
    for flat in flats:
        held[flat.optim_home] += flat.master_bytes
    return held


def gradients_of(gradients: Iterable[FlatGradient]) -> Resting:
    """What is kept of gradients."""
    held: Resting = Counter()
    for gradient in gradients:
        held[gradient.flat.optim_home if gradient.sharded else Home(gradient.flat.pool.device)] += (
            gradient.held_bytes
        )
    return held


def on(device: torch.device, held: Resting) -> int:
    """What is on a device."""
    return held[Home(device)]
