"""Weight gradients that are deferred, or accumulated in place, equal those of autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from launcher.tensor.layers import give_own_backward
from launcher.tensor.weight_gradients import adding_in, putting_off


def layer_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4) if kind == "linear" else Conv1D(4, 6), nn.Tanh(), nn.Linear(4, 3))


def gradients(layer: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}


def run(layer: nn.Module, microbatch: int) -> Tensor:
    x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(microbatch))
    out: Tensor = layer(x).square().sum()
    return out


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_added_in_place_as_autograd_adds(kind: str) -> None:
    plain, own = layer_of(kind), layer_of(kind)
    give_own_backward(own)
    weights = {
        id(p): torch.full_like(p, torch.nan) for n, p in own.named_parameters() if n.endswith("weight")
    }
    for microbatch in range(3):
        run(plain, microbatch).backward()
        with adding_in(lambda leaf: weights.get(id(leaf))):
            run(own, microbatch).backward()
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(gradients(own)[name], gradient)
    for parameter in own.parameters():
        if id(parameter) in weights:
            assert parameter.grad is weights[id(parameter)], "the sum lies where it was asked to lie"


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_put_off_then_in_place_or_through_autograd(kind: str) -> None:
    plain, own = layer_of(kind), layer_of(kind)
    give_own_backward(own)
    places = {id(own[0].weight): torch.empty_like(own[0].weight)}
    run(plain, 0).backward()
    with putting_off() as later:
        run(own, 0).backward()
    assert own[0].weight.grad is None and len(later) == 2
    leaves, computed = later.computed(lambda leaf: places.get(id(leaf)))
    assert [leaf is own[2].weight for leaf in leaves] == [True], "what has no place goes through autograd"
    torch.autograd.backward(leaves, computed)
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(gradients(own)[name], gradient)


def test_autograd_sees_what_has_another_dtype() -> None:
    own = layer_of("linear")
    give_own_backward(own)
    with adding_in(lambda leaf: leaf.new_empty(leaf.shape)), torch.autocast("cpu", torch.bfloat16):
        run(own, 0).backward()
    assert own[0].weight.grad is not None and own[0].weight.grad.dtype == torch.float32
