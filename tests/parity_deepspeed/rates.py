"""The learning rates and betas that a schedule sets: at construction and after each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

BASE_LR = 0.02
STEPS = 30


def follow(
    make: Callable[[torch.optim.Optimizer], Any], groups: int = 1, base_lr: float = BASE_LR
) -> list[list[float]]:
    """Create the schedule over an Adam and step it `STEPS` times.

    Args:
        make: optimizer -> schedule.
        groups: param groups; group i has i + 1 times the learning rate.

    Returns:
        STEPS + 1 rows: learning rates of the groups, then their betas.
    """
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(groups)]
    optimizer = torch.optim.Adam([{"params": [p], "lr": (i + 1) * base_lr} for i, p in enumerate(parameters)])
    schedule = make(optimizer)
    rows = [_row(optimizer)]
    for _ in range(STEPS):
        optimizer.step()
        schedule.step()
        rows.append(_row(optimizer))
    return rows


def _row(optimizer: torch.optim.Optimizer) -> list[float]:
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    return rates + [float(beta) for group in optimizer.param_groups for beta in group["betas"]]
