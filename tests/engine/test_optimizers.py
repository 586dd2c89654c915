"""Optimizers and schedules, from the JSON or the caller, match plain PyTorch at every stage."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, StepLR

from launcher.errors import ConfigError
from tests.engine.driving import STAGES, advance, config_of, engine_of, microbatches, truth, whole_weights
from tests.pool import RankContext, WorkerPool
from tests.zero.models import points, stack

STEPS = range(5)
Left = tuple[list[float], dict[str, Tensor]]


def assert_like(got: Left, want: Left) -> None:
    assert got[0] == pytest.approx(want[0], rel=1e-5)
    for name, value in want[1].items():
        torch.testing.assert_close(
            got[1][name], value, rtol=1e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def plain(make: Callable[..., Optimizer], schedule: Callable[[Optimizer], LRScheduler] | None = None) -> Left:
    model = stack()
    optimizer = make(model)
    scheduler = schedule(optimizer) if schedule else None
    losses = []
    for step in STEPS:
        losses += truth(optimizer, model, [step], 2)
        if scheduler:
            scheduler.step()
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return the usual groups: matrices decay, vectors do not; and the head has its own learning rate."""
    named = [(name, p) for name, p in model.named_parameters() if not name.startswith("last")]
    return [
        {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.3},
        {"params": [p for _, p in named if p.dim() <= 1], "weight_decay": 0.0},
        {"params": list(model.get_submodule("last").parameters()), "lr": 0.001},
    ]


def grouped_adamw(model: nn.Module) -> Optimizer:
    return AdamW(groups(model), lr=0.02)


def all_of(make: Callable[..., Optimizer], model: nn.Module) -> Optimizer:
    return make(model.parameters())


# ---- the caller's -------------------------------------------------------------------------------


def with_client(ctx: RankContext, stage: int, how: str) -> Left:
    model = stack()
    given: dict[str, Any] = {"optimizer": grouped_adamw(model)}
    if how == "callable":
        given = {"optimizer": partial(AdamW, lr=0.02), "model_parameters": groups(model)}
    config = config_of(stage)  # its AdamW with another rate is beaten
    if how == "json":
        given = {"model_parameters": groups(model)}
        config = config_of(stage, optimizer={"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.01}})
    engine = engine_of(config, model, **given)
    assert engine.get_lr() == [0.02, 0.02, 0.001] and engine.lr == 0.02
    assert [group["weight_decay"] for group in engine.optimizer.param_groups] == [0.3, 0.0, 0.01]
    assert engine.get_type() == ["AdamW"] * 3 and engine.get_mom() == [(0.9, 0.999)] * 3
    return advance(engine, ctx, STEPS), whole_weights(engine)


@pytest.mark.pairwise
@pytest.mark.key("optimizer", "optimizer.params")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", ["instance", "callable", "json"])
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_param_groups(pool: WorkerPool, stage: int, how: str, world: int) -> None:
    assert_like(pool.run(with_client, world, stage, how)[0], plain(grouped_adamw))


def only_some(ctx: RankContext, stage: int) -> Left:
    model = stack()
    engine = engine_of(config_of(stage), model, model_parameters=model.blocks.parameters())
    return advance(engine, ctx, STEPS), whole_weights(engine)


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_that_no_group_has_stay(pool: WorkerPool, stage: int) -> None:
    want = plain(lambda model: AdamW(model.blocks.parameters(), lr=0.01, weight_decay=0.1))
    assert_like(pool.run(only_some, 2, stage)[0], want)
    assert torch.equal(want[1]["first.weight"], stack().first.weight)


# ---- the JSON's ---------------------------------------------------------------------------------

NAMED: dict[str, tuple[dict[str, Any], Callable[..., Optimizer]]] = {
    "SGD": (
        {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
        partial(SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    ),
    "sgd": (
        {"lr": 0.05, "momentum": 0.9, "nesterov": True},
        partial(SGD, lr=0.05, momentum=0.9, nesterov=True),
    ),
    "RMSprop": ({"lr": 0.002, "momentum": 0.5}, partial(RMSprop, lr=0.002, momentum=0.5)),
    "Adagrad": ({}, partial(Adagrad, lr=0.01)),
    "NAdam": ({"lr": 0.004}, partial(NAdam, lr=0.004)),
    "Adam": ({"lr": 0.01, "weight_decay": 0.3}, partial(AdamW, lr=0.01, weight_decay=0.3)),
    "adam": (
        {"lr": 0.01, "weight_decay": 0.3, "adam_w_mode": False, "betas": [0.8, 0.9]},
        partial(Adam, lr=0.01, weight_decay=0.3, betas=(0.8, 0.9)),
    ),
    "AdamW": ({"lr": 0.01, "amsgrad": True}, partial(AdamW, lr=0.01, weight_decay=0, amsgrad=True)),
    "ADAMW": ({"lr": 0.01, "torch_adam": True, "eps": 1e-4}, partial(AdamW, lr=0.01, eps=1e-4)),
    "Adadelta": ({"lr": 0.5, "rho": 0.8}, partial(Adadelta, lr=0.5, rho=0.8)),
    "Adamax": ({"betas": [0.8, 0.9]}, partial(Adamax, lr=0.002, betas=(0.8, 0.9))),
    "ASGD": ({"lambd": 0.01, "t0": 2}, partial(ASGD, lr=0.01, lambd=0.01, t0=2)),
    "RAdam": (
        {"weight_decay": 0.3, "decoupled_weight_decay": True},
        partial(RAdam, lr=0.001, weight_decay=0.3, decoupled_weight_decay=True),
    ),
    "Rprop": ({"etas": [0.4, 1.1]}, partial(Rprop, lr=0.01, etas=(0.4, 1.1))),
}


def with_json(ctx: RankContext, stage: int, name: str) -> Left:
    engine = engine_of(config_of(stage, optimizer={"type": name, "params": NAMED[name][0]}))
    return advance(engine, ctx, STEPS), whole_weights(engine)


@pytest.mark.pairwise
@pytest.mark.key(
    "optimizer.type", "optimizer.params.lr", "optimizer.params.betas", "optimizer.params.eps",
    "optimizer.params.weight_decay", "optimizer.params.adam_w_mode", "optimizer.params.torch_adam",
    "optimizer.params.amsgrad", "optimizer.params.momentum", "optimizer.params.nesterov", "optimizer.params.rho",
    "optimizer.params.lambd", "optimizer.params.t0", "optimizer.params.decoupled_weight_decay",
    "optimizer.params.etas",
)  # fmt: skip
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("name", NAMED)
def test_named_in_the_json(pool: WorkerPool, stage: int, name: str) -> None:
    """ "Adam" decays like AdamW, unless adam_w_mode is false."""
    assert_like(pool.run(with_json, 2, stage, name)[0], plain(partial(all_of, NAMED[name][1])))


# ---- schedules ----------------------------------------------------------------------------------


def halve(optimizer: Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: 0.5**step)


class Halving(LambdaLR):
    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer, lambda step: 0.5**step)


def with_schedule(ctx: RankContext, stage: int, how: str) -> tuple[Left, list[float]]:
    model = stack()
    warmup = {"type": "WarmupLR", "params": {"warmup_num_steps": 100}}
    config = config_of(stage, scheduler=warmup)  # beaten by the caller's
    if how == "client's":
        optimizer = AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        engine = engine_of(config, model, optimizer=optimizer, lr_scheduler=halve(optimizer))
    elif how == "afterwards":
        engine = engine_of(config_of(stage), model)
        engine.lr_scheduler = halve(engine.optimizer)
    else:
        engine = engine_of(config, model, lr_scheduler=halve if how == "callable" else Halving)
    assert isinstance(engine.lr_scheduler, LambdaLR)
    rates, losses = [], []
    for step in STEPS:
        rates.append(engine.lr)
        losses += advance(engine, ctx, [step])
    return (losses, whole_weights(engine)), rates


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", ["client's", "afterwards", "callable", "class"])
def test_schedules_of_torch(pool: WorkerPool, stage: int, how: str) -> None:
    left, rates = pool.run(with_schedule, 2, stage, how)[0]
    assert rates == [0.01 * 0.5**step for step in STEPS]
    assert_like(left, plain(partial(all_of, partial(AdamW, lr=0.01, weight_decay=0.1)), halve))


def change_rates(ctx: RankContext, stage: int) -> Left:
    engine = engine_of(config_of(stage))
    losses = []
    for step in STEPS:
        for group in engine.optimizer.param_groups:
            group["lr"], group["weight_decay"] = 0.01 / (step + 1), 0.1 * step
        assert engine.lr == 0.01 / (step + 1)
        losses += advance(engine, ctx, [step])
    return losses, whole_weights(engine)


@pytest.mark.parametrize("stage", STAGES)
def test_param_groups_are_live(pool: WorkerPool, stage: int) -> None:
    model = stack()
    adamw, losses = AdamW(model.parameters()), []
    for step in STEPS:
        adamw.param_groups[0].update(lr=0.01 / (step + 1), weight_decay=0.1 * step)
        losses += truth(adamw, model, [step], 2)
    want = losses, {name: p.detach() for name, p in model.named_parameters()}
    assert_like(pool.run(change_rates, 2, stage)[0], want)


def with_metric(ctx: RankContext) -> list[float]:
    """Pass engine.step(lr_kwargs=...) to the schedule."""
    plateau = partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.1)
    engine = engine_of(config_of(3), lr_scheduler=plateau)
    rates = []
    for step in range(3):
        ((x, y),) = microbatches(ctx, step)
        engine.backward(engine(x, y))
        engine.step(lr_kwargs={"metrics": 1.0})
        rates.append(engine.lr)
    return rates


def test_arguments_of_a_schedule(pool: WorkerPool) -> None:
    assert pool.run(with_metric, 2)[0] == pytest.approx([0.01, 0.001, 0.0001])


# ---- refusals -----------------------------------------------------------------------------------


class Mine(SGD):
    """An optimizer that is not in torch.optim."""


def refused(ctx: RankContext, how: str) -> str:
    with pytest.raises(ConfigError) as caught:
        refuse(how)
    return str(caught.value)


def refuse(how: str) -> None:
    model = stack()
    if how == "lbfgs":
        engine_of(config_of(3), model, optimizer=torch.optim.LBFGS(model.parameters()))
    elif how == "lbfgs in the JSON":
        engine_of(config_of(3, optimizer={"type": "LBFGS"}), model)
    elif how == "unknown class":
        engine_of(config_of(3), model, optimizer=Mine(model.parameters(), lr=0.01))
    elif how == "another model":
        engine_of(config_of(3), model, optimizer=AdamW(stack().parameters()))
    elif how == "no optimizer":
        engine = engine_of(config_of(3, optimizer=None), model)
        engine.backward(engine(*points(0)))
        engine.step()


@pytest.mark.key("zero_allow_untested_optimizer", "optimizer.type")
@pytest.mark.parametrize(("how", "said"), [
    ("lbfgs", "LBFGS is not elementwise"),
    ("lbfgs in the JSON", "LBFGS does not support sharded state"),
    ("unknown class", "zero_allow_untested_optimizer"),
    ("another model", "that the model does not have"),
    ("no optimizer", "the engine has no optimizer"),
])  # fmt: skip
def test_refusals(pool: WorkerPool, how: str, said: str) -> None:
    assert said in pool.run(refused, 1, how)[0]


def without_optimizer(ctx: RankContext, stage: int) -> float:
    """Evaluate without an optimizer."""
    engine = engine_of(config_of(stage, optimizer=None))
    assert engine.optimizer is None and engine.lr_scheduler is None and engine.get_lr() == []
    return float(engine.eval_batch(iter(microbatches(ctx, 0))))


@pytest.mark.parametrize("stage", [0, 3])
def test_no_optimizer_is_needed_to_evaluate(pool: WorkerPool, stage: int) -> None:
    assert pool.run(without_optimizer, 2, stage)[0] == pytest.approx(stack()(*points(0)).item(), rel=1e-5)


def own_class(ctx: RankContext, stage: int) -> Left:
    model = stack()
    optimizer = Mine(model.parameters(), lr=0.05, momentum=0.9)
    config = config_of(stage, optimizer=None, zero_allow_untested_optimizer=True)
    engine = engine_of(config, model, optimizer=optimizer, lr_scheduler=StepLR(optimizer, 2, 0.5))
    return advance(engine, ctx, STEPS), whole_weights(engine)


@pytest.mark.key("zero_allow_untested_optimizer")
@pytest.mark.parametrize("stage", [0, 3])
def test_an_own_class_when_it_is_allowed(pool: WorkerPool, stage: int) -> None:
    want = plain(partial(all_of, partial(SGD, lr=0.05, momentum=0.9)), lambda o: StepLR(o, 2, 0.5))
    assert_like(pool.run(own_class, 2, stage)[0], want)


class Descent(torch.optim.Optimizer):
    """Has groups with the key `fused`, as some libraries do, and does not know torch's `grad_scale`."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05, "fused": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in [p for group in self.param_groups for p in group["params"] if p.grad is not None]:
            p.sub_(0.05 * p.grad)


def of_another_fused_class(ctx: RankContext) -> Left:
    model = stack()
    config = config_of(1, optimizer=None, zero_allow_untested_optimizer=True)
    engine = engine_of(config, model, optimizer=Descent(model.parameters()))
    return advance(engine, ctx, STEPS), whole_weights(engine)


def test_gradients_are_divided_for_a_fused_class_of_others(pool: WorkerPool) -> None:
    assert_like(pool.run(of_another_fused_class, 2)[0], plain(partial(all_of, partial(SGD, lr=0.05))))


def forced(ctx: RankContext, force: bool) -> Left:
    model = stack()
    config = config_of(3, optimizer=None, zero_force_ds_cpu_optimizer=force)
    engine = engine_of(config, model, optimizer=SGD(model.parameters(), lr=0.05))
    return advance(engine, ctx, STEPS), whole_weights(engine)


@pytest.mark.key("zero_force_ds_cpu_optimizer")
def test_the_callers_optimizer_is_taken_whatever_deepspeed_would_force(pool: WorkerPool) -> None:
    for force in (True, False):
        assert_like(pool.run(forced, 2, force)[0], plain(partial(all_of, partial(SGD, lr=0.05))))
