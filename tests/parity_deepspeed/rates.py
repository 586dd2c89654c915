"""The learning rates that a schedule gives an optimizer: at construction and after each of its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

BASE_LR = 0.02
STEPS = 30


def follow(make: Callable[[torch.optim.Optimizer], Any], base_lr: float = BASE_LR) -> list[float]:
    """Makes the schedule over an SGD and steps it `STEPS` times: STEPS + 1 learning rates."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=base_lr)
    schedule = make(optimizer)
    rates = [float(optimizer.param_groups[0]["lr"])]
    for _ in range(STEPS):
        optimizer.step()
        schedule.step()
        rates.append(float(optimizer.param_groups[0]["lr"]))
    return rates
