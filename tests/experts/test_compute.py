"""Experts on sorted rows match transformers' own implementations, including gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from launcher.experts import compute
from launcher.experts.modules import experts_in
from tests.experts.families import model_of

PAIRS = 20


def computed(experts: Any, implementation: str, index: Tensor) -> list[Tensor]:
    """Return the output, and the gradients of the rows and of all parameters."""
    experts.config._experts_implementation_internal = implementation
    rows = torch.randn(len(index), 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
    out = experts(rows, index, torch.ones(len(index), 1))
    experts.zero_grad()
    out.square().sum().backward()
    assert rows.grad is not None
    return [out.detach(), rows.grad, *(p.grad for p in experts.parameters())]


@pytest.mark.parametrize("family", ["plain", "biases"])
@pytest.mark.parametrize(
    "index", [(torch.arange(PAIRS) % 3).sort()[0], torch.full((PAIRS,), 1)], ids=["mixed", "one expert"]
)
def test_it_is_what_transformers_computes(family: str, index: Tensor) -> None:
    model = model_of(family, "grouped_mm")
    _, experts = experts_in(model)[0]
    wanted = computed(experts, "eager", index[:, None])
    experts.config._experts_implementation_internal = "grouped_mm"
    compute.install(experts)
    assert experts.config is not model.config and model.config._experts_implementation == "grouped_mm"
    for mine, theirs in zip(computed(experts, compute.NAME, index[:, None]), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_another_choice_of_the_user_stays() -> None:
    model = model_of("plain", "eager")
    _, experts = experts_in(model)[0]
    compute.install(experts)
    assert experts.config is model.config
