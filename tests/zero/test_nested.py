"""Container blocks, and partially frozen blocks, at stage 3."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from launcher.zero import set_z3_leaf_modules
from tests.engine.driving import ROWS, config_of, engine_of, microbatches, whole_weights
from tests.pool import RankContext, WorkerPool
from tests.zero.models import points

WIDTH, LR = 4, 0.1


class Contained(nn.Module):
    """Layers that are lists or dicts, which are never called."""

    def __init__(self, dicts: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        pairs = [(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(3)]
        self.layers = nn.ModuleList(
            nn.ModuleDict({"linear": linear, "norm": norm}) if dicts else nn.ModuleList([linear, norm])
            for linear, norm in pairs
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            linear, norm = layer.values() if isinstance(layer, nn.ModuleDict) else layer  # type: ignore[misc]
            x = norm(torch.tanh(linear(x)))
        return (x.sum(-1) - y).square().mean()


class Adapted(nn.Module):
    """A frozen norm whose backward comes after the last gradient of its block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


class Checkpointed(nn.Module):
    """Blocks wrapped in torch.utils.checkpoint."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Adapted() for _ in range(3)])
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.reentrant = reentrant

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.requires_grad_()
        for layer in self.layers:
            by_json = self.reentrant is None
            x = layer(x) if by_json else checkpoint(layer, x, use_reentrant=self.reentrant)
        return (self.norm(x).sum(-1) - y).square().mean()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dicts": partial(Contained, dicts=True),
    "lists": partial(Contained, dicts=False),
    "frozen norms": partial(Checkpointed, reentrant=False),
    "frozen norms, reentrant": partial(Checkpointed, reentrant=True),
    "frozen norms, by the JSON": partial(Checkpointed, reentrant=None),
}


def trained(ctx: RankContext, kind: str, leaves: bool) -> dict[str, Tensor]:
    model = MODELS[kind]()
    if leaves:
        set_z3_leaf_modules(model, [Adapted])
    sections = {"activation_checkpointing": {}} if "JSON" in kind else {}
    engine = engine_of(config_of(3, optimizer={"type": "SGD", "params": {"lr": LR}}, **sections), model)
    for step in range(2):
        engine.backward(engine(*microbatches(ctx, step)[0]))
        engine.step()
    assert engine.zero.unsharder.live == 0
    return whole_weights(engine)


@pytest.mark.parametrize(
    ("kind", "leaves"),
    [(kind, leaves) for kind in MODELS for leaves in (False, True) if "frozen" in kind or not leaves],
)
def test_they_train_as_in_one_process(pool: WorkerPool, kind: str, leaves: bool) -> None:
    model = MODELS[kind]()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    for step in range(2):
        optimizer.zero_grad()
        model(*points(step, ROWS)).backward()
        optimizer.step()
    for weights in pool.run(trained, 2, kind, leaves):
        for name, value in model.named_parameters():
            torch.testing.assert_close(weights[name], value.detach(), rtol=1e-5, atol=1e-6, msg=name)
