"""Whether a split model computes what the plain one does: logits, loss, every gradient, and weights after 3 steps."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from launcher.comm import Axis, all_reduce
from launcher.tensor.apply import apply
from launcher.tensor.split_model import SplitModel, TensorParallelOptions
from tests.pool.device import DEVICE

STEPS, LR, NOISE = 3, 0.01, 0.05


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


@dataclass
class Truth:
    """What the plain model computes.

    Args:
        logits: in eval mode.
        losses: of each step.
        gradients: of the first step, by name; None: there is none.
        weights: after the last step, by name.
    """

    logits: Tensor
    losses: list[Tensor]
    gradients: dict[str, Tensor | None]
    weights: dict[str, Tensor]


def truth_of(model: nn.Module, batch: dict[str, Tensor]) -> Truth:
    """Train a copy of `model`."""
    model = copy.deepcopy(model).to(DEVICE)
    logits = _logits(model, batch)
    losses, gradients = [], {}
    for step in range(STEPS):
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss.detach())
        if step == 0:
            gradients = _gradients(model)
        descend(model)
    return Truth(logits, losses, gradients, {name: p.detach() for name, p in model.named_parameters()})


def compare(
    model: nn.Module, batch: dict[str, Tensor], axis: Axis, options: TensorParallelOptions | None = None
) -> Difference:
    """Train `model` plain and split. Every rank gives the same model and batch."""
    split_model = copy.deepcopy(model).to(DEVICE)
    made = apply(split_model, axis, options or TensorParallelOptions(), device=DEVICE)
    return compare_with(truth_of(model, batch), split_model, made, batch)


def compare_with(
    truth: Truth, split_model: nn.Module, made: SplitModel, batch: dict[str, Tensor]
) -> Difference:
    """Train `split_model`."""
    logits = relative(_logits(split_model, batch), truth.logits)
    loss = gradients = 0.0
    worst = ""
    for step in range(STEPS):
        found = split_model(**batch).loss
        loss = max(loss, relative(found, truth.losses[step]))
        found.backward()
        sum_partial(split_model, made)
        if step == 0:
            gradients, worst = _gradient_difference(truth.gradients, split_model, made)
        descend(split_model)
    weights = max(
        relative(p, made.splits[name].take(truth.weights[name])) for name, p in split_model.named_parameters()
    )
    return Difference(logits, loss, gradients, weights, worst)


def _logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    model.eval()
    with torch.no_grad():
        logits: Tensor = model(**{key: value for key, value in batch.items() if key != "labels"}).logits
    model.train()
    return logits


def _gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


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
    """The largest difference of two models that have gone backward, and where it is."""
    return _gradient_difference(_gradients(model), split_model, made)


def _gradient_difference(
    truth: dict[str, Tensor | None], split_model: nn.Module, made: SplitModel
) -> tuple[float, str]:
    found = dict(split_model.named_parameters())
    worst = 0.0, ""
    largest = max(gradient.abs().max() for gradient in truth.values() if gradient is not None)
    for name, gradient in truth.items():
        mine = found[name].grad
        if gradient is None or not gradient.any():
            difference = 0.0 if mine is None or not mine.abs().max() > 1e-7 else float("inf")
        elif mine is None:
            difference = float("inf")
        else:  # far below the largest lies what is zero but for rounding: a bias of keys
            scale = gradient.abs().max().clamp_min(NOISE * largest)
            difference = relative(mine, made.splits[name].take(gradient), scale)
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
