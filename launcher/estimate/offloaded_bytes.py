"""Bytes of parameters, gradients and master weights by their placement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from launcher.offload.placement import Placement
from launcher.zero.flat import FlatBuffer
from launcher.zero.gradients import FlatGradient

OffloadedBytes = Counter[Placement]


def parameters_of(flats: Iterable[FlatBuffer]) -> OffloadedBytes:
    """Return the bytes of parameters by placement."""
    held: OffloadedBytes = Counter()
    for flat in flats:
        held[flat.params_placement if flat.sharded else Placement(flat.pool.device)] += flat.held_bytes
    return held


def masters_of(flats: Iterable[FlatBuffer]) -> OffloadedBytes:
    """Return the bytes of separate master weights by placement."""
    held: OffloadedBytes = Counter()
    for flat in flats:
        held[flat.optim_placement] += flat.master_bytes
    return held


def gradients_of(gradients: Iterable[FlatGradient]) -> OffloadedBytes:
    """Return the bytes of gradients by placement."""
    held: OffloadedBytes = Counter()
    for gradient in gradients:
        held[gradient.flat.optim_placement if gradient.sharded else Placement(gradient.flat.pool.device)] += (
            gradient.held_bytes
        )
    return held


def on(device: torch.device, held: OffloadedBytes) -> int:
    """Return the bytes placed on a device."""
    return held[Placement(device)]
