"""Parameters that share memory are trained only if they are one parameter; those without memory are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import launcher
from launcher.errors import LauncherError
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE


def overlapping(ctx: RankContext, kind: str) -> str:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    whole = torch.zeros(2, 4, 4)
    if kind == "same memory":
        model[1].weight = nn.Parameter(model[0].weight.data)
    elif kind == "transposed":
        model[1].weight = nn.Parameter(model[0].weight.data.t())
    elif kind == "frozen":
        model[1].weight = nn.Parameter(model[0].weight.data)
        model.requires_grad_(False)[0].bias.requires_grad_(True)
    else:  # next to each other, as a flat buffer of another engine leaves them
        model[0].weight, model[1].weight = nn.Parameter(whole[0]), nn.Parameter(whole[1])
    config = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    try:
        launcher.initialize(model=model, config=config, device=DEVICE)
    except LauncherError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "refused"),
    [("same memory", True), ("transposed", True), ("frozen", False), ("neighbours", False)],
)
def test_two_parameters_of_one_memory_are_refused(pool: WorkerPool, kind: str, refused: bool) -> None:
    """Each would be trained by itself, without a word."""
    said = pool.run(overlapping, 1, kind)[0]
    assert ("0.weight and 1.weight share memory" in said) == refused


def of_several_tensors(ctx: RankContext) -> str:
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(TwoTensor(model.weight.data, model.weight.data), requires_grad=False)
    with pytest.raises(LauncherError) as error:
        launcher.initialize(model=model, config={"train_batch_size": 1}, device=DEVICE)
    return str(error.value)


def test_tensors_of_several_are_refused(pool: WorkerPool) -> None:
    """As torchao's quantized weights, and DTensor."""
    assert "weight is a TwoTensor, which consists of several tensors" in pool.run(of_several_tensors, 1)[0]
