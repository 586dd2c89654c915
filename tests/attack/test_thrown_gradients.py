"""Changes that a user makes to gradients between backward and step work as in PyTorch, or are refused."""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import launcher
from launcher.errors import LauncherError
from tests.engine.driving import ROWS, config_of, microbatches, whole_weights
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE
from tests.zero.models import points, stack

LR = 0.5
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
SETTINGS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 2, offloaded": {"stage": 2, "zero_optimization": OFFLOADED},
    "stage 1, wide sums": {"stage": 1, "bf16": {"enabled": True}},
    "stage 0, accumulating": {"stage": 0, "accumulation": 2},
    "stage 3, accumulating": {"stage": 3, "accumulation": 2},
}


class Around(nn.Module):
    """A user's module that contains the model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inside = module


def one_parameter(module: nn.Module) -> None:
    next(p for p in reversed(list(module.parameters())) if p.requires_grad).grad = None


def every_parameter(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = None


def last_submodule(module: nn.Module) -> None:
    [m for m in module.modules() if m._parameters][-1].zero_grad()


# How gradients are thrown away: (of the engine, of plain PyTorch)
Throw = Callable[[nn.Module], object]
WAYS: dict[str, tuple[Callable[[Any, Any], object], Throw]] = {
    "module.zero_grad()": (lambda engine, _: engine.module.zero_grad(), lambda m: m.zero_grad()),
    "... set_to_none=False": (
        lambda engine, _: engine.module.zero_grad(set_to_none=False),
        lambda m: m.zero_grad(),
    ),
    "... of a module around it": (
        lambda engine, _: Around(engine.module).zero_grad(),
        lambda m: m.zero_grad(),
    ),
    "... of a module inside": (lambda engine, _: last_submodule(engine.module), last_submodule),
    "engine.zero_grad()": (lambda engine, _: engine.zero_grad(), lambda m: m.zero_grad()),
    "engine.optimizer.zero_grad()": (lambda engine, _: engine.optimizer.zero_grad(), lambda m: m.zero_grad()),
    "the user's optimizer.zero_grad()": (lambda _, mine: mine.zero_grad(), lambda m: m.zero_grad()),
    "p.grad = None": (lambda engine, _: every_parameter(engine.module), every_parameter),
    "p.grad = None of one": (lambda engine, _: one_parameter(engine.module), one_parameter),
}


def engine_and_optimizer(setting: dict[str, Any]) -> tuple[Any, torch.optim.Optimizer]:
    model = stack()
    if "bf16" in setting:
        model.register_forward_pre_hook(lambda _, args: tuple(arg.bfloat16() for arg in args))
    mine = torch.optim.SGD(model.parameters(), lr=LR)
    config = config_of(**setting, zero_allow_untested_optimizer=True) | {"optimizer": None}
    config = {key: value for key, value in config.items() if value is not None}
    return launcher.initialize(model=model, config=config, device=DEVICE, optimizer=mine)[0], mine


def weights_after(ctx: RankContext, setting: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Return the weights after a discarded backward, in each way, then a backward that counts, and a step."""
    found = {}
    for name, (throw, _) in WAYS.items():
        engine, mine = engine_and_optimizer(setting)
        parts = setting.get("accumulation", 1)
        unwanted, wanted = microbatches(ctx, 0, parts)[0], microbatches(ctx, 1)[0]
        if parts == 1:
            engine.module(*unwanted).backward()
        else:
            engine.backward(engine(*unwanted), scale_wrt_gas=False)
            engine.step()
        throw(engine, mine)
        engine.backward(engine(*wanted), scale_wrt_gas=False)
        engine.step()
        found[name] = whole_weights(engine)
        engine.destroy()
    return found


def truth(throw: Throw, parts: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return plain PyTorch's results on the global batches."""
    model = stack()
    x, y = points(0, ROWS)
    model(x[: ROWS // parts], y[: ROWS // parts]).backward()
    throw(model)
    model(*points(1, ROWS)).backward()
    torch.optim.SGD(model.parameters(), lr=LR).step()
    return {name: value.detach().to(dtype) for name, value in model.named_parameters()}


@pytest.mark.parametrize("setting", SETTINGS)
def test_gradients_that_are_thrown_away_are_not_applied(pool: WorkerPool, setting: str) -> None:
    wide = "bf16" in SETTINGS[setting]
    parts = SETTINGS[setting].get("accumulation", 1)
    for found in pool.run(weights_after, 2, SETTINGS[setting]):
        for way, weights in found.items():
            want = truth(WAYS[way][1], parts, torch.bfloat16 if wide else torch.float32)
            for name, value in weights.items():
                torch.testing.assert_close(
                    value.float(),
                    want[name].float(),
                    rtol=1e-5,
                    atol=2e-2 if wide else 1e-6,
                    msg=f"{way}: {name}",
                )


def edited(ctx: RankContext, stage: int) -> tuple[dict[str, Tensor], str, dict[str, Tensor]]:
    """Return the weights after a step with a gradient that the user doubled, the messages, and the weights after a
    gradient that was discarded last.
    """
    engine, _ = engine_and_optimizer({"stage": stage})
    engine.backward(engine(*microbatches(ctx, 0)[0]))
    said = ""
    try:
        for parameter in engine.module.parameters():
            old = parameter.grad
            parameter.grad = torch.ones(parameter.shape) if old is None else old * 2
    except LauncherError as error:
        said = str(error)
    engine.step()
    doubled = whole_weights(engine)
    engine.backward(engine(*microbatches(ctx, 1)[0]))
    engine.module.zero_grad()
    engine.step()
    return doubled, said, whole_weights(engine)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_gradient_can_be_set_or_an_error_says_why_not(pool: WorkerPool, stage: int) -> None:
    model = stack()
    model(*points(0, ROWS)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter -= LR * parameter.grad * (2 if stage < 2 else 1)
    for doubled, said, after in pool.run(edited, 2, stage):
        assert ("cannot be set" in said) == (stage >= 2)
        for name, value in model.named_parameters():
            torch.testing.assert_close(doubled[name], value.detach(), rtol=1e-5, atol=1e-6)
            assert torch.equal(doubled[name], after[name]), "thrown away after the last backward"


def copied(ctx: RankContext) -> tuple[set[str], set[str]]:
    """Return the classes of the parameters of a copy and of a file."""
    engine, _ = engine_and_optimizer({"stage": 2})
    (
        engine.module._forward_hooks.clear(),
        engine.module._forward_pre_hooks.clear(),
    )  # torch's pickle takes none of ours
    buffer = io.BytesIO()
    torch.save(engine.module, buffer)
    buffer.seek(0)
    models: Iterable[nn.Module] = (copy.deepcopy(engine.module), torch.load(buffer, weights_only=False))
    classes = [{type(p).__name__ for p in model.parameters()} for model in models]
    return classes[0], classes[1]


def test_copies_are_plain(pool: WorkerPool) -> None:
    assert pool.run(copied, 2) == [({"Parameter"}, {"Parameter"})] * 2


def test_a_plain_model_beside_an_engine_is_left_alone() -> None:
    model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(model.parameters()).zero_grad()
    assert model.weight.grad is None
    assert type(model.weight) is nn.Parameter


def warned(ctx: RankContext) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("launcher").addHandler(handler)
    engine, _ = engine_and_optimizer({"stage": 2, "accumulation": 2})
    for _ in range(2):
        for part in microbatches(ctx, 0, 2):
            engine.backward(engine(*part))
            engine.step()
            engine.module.zero_grad()
    logging.getLogger("launcher").removeHandler(handler)
    return lines


def test_microbatches_that_are_thrown_away_are_told_of_once(pool: WorkerPool) -> None:
    first, other = pool.run(warned, 2)
    assert len(first) <= 1, "once in a process"
    assert all("zero_grad() between the microbatches" in line for line in first)
    assert other == []
