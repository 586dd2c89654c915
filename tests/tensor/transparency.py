"""Whether a split model computes what the plain one does: logits, loss, every gradient, and weights after 3 steps."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from launcher.comm import Axis, all_reduce
from launcher.tensor.apply import Options, SplitModel, apply

STEPS, LR, NOISE = 3, 0.01, 0.05
CPU = torch.device("cpu")


@dataclass
class Difference:
    """Largest difference, relative to the largest value of what was compared."""

    logits: float
    loss: float
    gradients: float
    weights: float
    worst: str

    @property
    def largest(self) -> float:
        return max(self.logits, self.loss, self.gradients, self.weights)


def compare(
    model: nn.Module, batch: dict[str, Tensor], axis: Axis, options: Options | None = None
) -> Difference:
    """Train `model` plain and split. Every rank gives the same model and batch."""
    split_model = copy.deepcopy(model)
    made = apply(split_model, axis, options or Options(), device=CPU)
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    with torch.no_grad():
        model.eval(), split_model.eval()
        logits = relative(split_model(**inputs).logits, model(**inputs).logits)
        model.train(), split_model.train()
    loss = gradients = 0.0
    worst = ""
    for step in range(STEPS):
        expected, found = model(**batch).loss, split_model(**batch).loss
        loss = max(loss, relative(found, expected))
        expected.backward()
        found.backward()
        sum_partial(split_model, made)
        if step == 0:
            gradients, worst = gradient_difference(model, split_model, made)
        descend(model), descend(split_model)
    truth = dict(model.named_parameters())
    weights = max(
        relative(p, made.splits[name].take(truth[name])) for name, p in split_model.named_parameters()
    )
    return Difference(logits, loss, gradients, weights, worst)


def relative(found: Tensor, expected: Tensor, scale: Tensor | None = None) -> float:
    if found.numel() == 0:
        return 0.0
    if found.shape != expected.shape:
        return float("inf")
    if scale is None:
        scale = expected.detach().abs().max().clamp_min(1e-3)
    difference = ((found - expected).detach().abs().max() / scale).item()
    return difference if difference == difference else float("inf")


def gradient_difference(model: nn.Module, split_model: nn.Module, made: SplitModel) -> tuple[float, str]:
    found = dict(split_model.named_parameters())
    worst = 0.0, ""
    largest = max(p.grad.abs().max() for p in model.parameters() if p.grad is not None)
    for name, parameter in model.named_parameters():
        mine = found[name].grad
        if parameter.grad is None or not parameter.grad.any():
            difference = 0.0 if mine is None or not mine.abs().max() > 1e-7 else float("inf")
        elif mine is None:
            difference = float("inf")
        else:  # far below the largest lies what is zero but for rounding: a bias of keys
            scale = parameter.grad.abs().max().clamp_min(NOISE * largest)
            difference = relative(mine, made.splits[name].take(parameter.grad), scale)
        worst = max(worst, (difference, name))
    return worst


def sum_partial(model: nn.Module, made: SplitModel) -> None:
    """What the engine does once a step, parameter by parameter."""
    for name, parameter in model.named_parameters():
        split = made.splits[name]
        if not split.partial or all(part.holders == 1 for part in split.parts):
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        at = 0
        for part in split.parts:
            mine = parameter.grad.narrow(split.dim, at, part.size) if split.shape else parameter.grad
            rows = mine.new_zeros(made.axis.degree // part.holders, *mine.shape)
            rows[part.group] = mine
            if part.holders > 1:
                all_reduce(rows.view(-1), made.axis, "test/partial").wait()
            mine.copy_(rows[part.group])
            at += part.size


@torch.no_grad()
def descend(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter -= LR * parameter.grad
            parameter.grad = None


def all_ranks(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
