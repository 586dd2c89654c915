"""Several backwards before a step accumulate gradients, at every stage: GANs, auxiliary losses, no_sync()."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from launcher.errors import LauncherError
from tests.engine.driving import STAGES, config_of, engine_of, microbatches, whole_weights
from tests.pool import RankContext, WorkerPool
from tests.zero.models import Stack, points, stack

ROWS, WIDTH, STEPS, LR = 8, 6, 3, 0.1
SGD = {"type": "SGD", "params": {"lr": LR}}


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inside = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor, label: float) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(
            self.inside(x).squeeze(-1), torch.full((len(x),), label, dtype=x.dtype)
        )


class Maker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.inside = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inside(x)
        return result


def drawn(step: int) -> tuple[Tensor, Tensor]:
    """Return (real rows, noise) of the global batch."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=generator) + 2, torch.randn(ROWS, WIDTH, generator=generator)


def adversarial(ctx: RankContext, stage: int, zero_of: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Run the loop of PyTorch's DCGAN tutorial with two engines."""
    config = config_of(stage, train_batch_size=ROWS, optimizer=SGD)
    critic, maker = engine_of(config, Critic()), engine_of(config, Maker())
    for step in range(STEPS):
        real, noise = (rows.chunk(ctx.world)[ctx.rank] for rows in drawn(step))
        (critic.module if zero_of == "module" else critic.optimizer).zero_grad()
        critic(real, 1.0).backward()
        fake = maker(noise)
        critic(fake.detach(), 0.0).backward()
        critic.step()
        (maker.module if zero_of == "module" else maker.optimizer).zero_grad()
        critic(fake, 1.0).backward()
        maker.step()
    return whole_weights(critic), whole_weights(maker)


def adversarial_truth() -> tuple[nn.Module, nn.Module]:
    critic, maker = Critic(), Maker()
    of_critic, of_maker = (torch.optim.SGD(m.parameters(), lr=LR) for m in (critic, maker))
    for step in range(STEPS):
        real, noise = drawn(step)
        of_critic.zero_grad()
        critic(real, 1.0).backward()
        fake = maker(noise)
        critic(fake.detach(), 0.0).backward()
        of_critic.step()
        of_maker.zero_grad()
        critic(fake, 1.0).backward()
        of_maker.step()
    return critic, maker


def close(found: dict[str, Tensor], want: nn.Module) -> None:
    for name, value in want.named_parameters():
        torch.testing.assert_close(found[name], value.detach(), rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("zero_of", ["module", "optimizer"])
@pytest.mark.parametrize("stage", STAGES)
def test_an_adversarial_pair_is_that_of_one_process(pool: WorkerPool, stage: int, zero_of: str) -> None:
    critic, maker = adversarial_truth()
    for found in pool.run(adversarial, 2, stage, zero_of):
        close(found[0], critic)
        close(found[1], maker)


def summed(ctx: RankContext, stage: int, how: str) -> dict[str, Tensor]:
    """Run two backwards and a step."""
    factor = {"gradient_predivide_factor": 4.0, "prescale_gradients": True} if how == "predivided" else {}
    engine = engine_of(config_of(stage, 2 if how == "accumulating" else 1, optimizer=SGD, **factor))
    first, second = (microbatches(ctx, step)[0] for step in (0, 1))
    if how == "no_sync":
        with engine.no_sync():
            engine.backward(engine(*first))
            engine.backward(engine(*second))
    elif how == "then no_sync":
        engine.backward(engine(*first))
        with engine.no_sync():
            engine.backward(engine(*second))
    else:
        if how == "accumulating":
            engine.backward(engine(*first))
            engine.step()
            engine.backward(engine(*first))
            engine.backward(engine(*second))
            engine.backward(engine(*second))
        else:
            engine.backward(engine(*first))
            engine.backward(engine(*second))
    engine.step()
    return whole_weights(engine)


HOWS = ["at the boundary", "accumulating", "predivided", "no_sync", "then no_sync"]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_several_backwards_are_summed(pool: WorkerPool, stage: int, how: str) -> None:
    model = stack()
    for step in (0, 1):
        model(*points(step, ROWS)).backward()
    torch.optim.SGD(model.parameters(), lr=LR).step()
    for found in pool.run(summed, 2, stage, how):
        close(found, model)


def mixed(ctx: RankContext, thrown: bool) -> str:
    """Combine a loss scaled by the engine and one scaled by the user."""
    engine = engine_of(config_of(1, 2, optimizer=SGD))
    engine.backward(engine(*microbatches(ctx, 0, 2)[0]))
    if thrown:
        engine.module.zero_grad()
    engine.step()
    engine(*microbatches(ctx, 0, 2)[1]).backward()
    try:
        engine.step()
    except LauncherError as error:
        return str(error)
    return ""


def test_losses_that_are_scaled_and_others_do_not_mix(pool: WorkerPool) -> None:
    assert all("call engine.backward(loss) for every loss" in said for said in pool.run(mixed, 2, False))
    assert pool.run(mixed, 2, True) == ["", ""]


def around(ctx: RankContext, stage: int) -> str:
    """The second backward starts from an inner module."""
    engine = engine_of(config_of(stage, optimizer=SGD))
    engine.backward(engine(*microbatches(ctx, 0)[0]))
    module: Any = engine.module
    assert isinstance(module, Stack)
    try:
        module.first(torch.ones(2, 4)).sum().backward()
    except LauncherError as error:
        return str(error)
    return ""


def test_a_second_backward_that_nobody_announced_is_refused(pool: WorkerPool) -> None:
    assert all("not a submodule" in said for said in pool.run(around, 2, 1))
    assert pool.run(around, 1, 1) == [""]


def alone(ctx: RankContext) -> dict[str, Tensor]:
    engine = engine_of(config_of(0, optimizer=SGD))
    for step in (0, 1):
        engine.backward(engine(*points(step, ROWS)))
    assert engine.module.first.weight.grad is not None
    engine.step()
    return whole_weights(engine)


def test_one_process_has_them_too(pool: WorkerPool) -> None:
    model = stack()
    for step in (0, 1):
        model(*points(step, ROWS)).backward()
    torch.optim.SGD(model.parameters(), lr=LR).step()
    close(pool.run(alone, 1)[0], model)
