"""Router losses over the global batch equal those of one process on one large batch."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import launcher
from launcher.config import load
from launcher.errors import ConfigError
from tests.experts.families import VOCAB, model_of
from tests.experts.test_parity import Trained
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE
from tests.tensor.running import plain_steps, whole_state

STEPS, LR, LENGTH, ROWS = 3, 0.05, 13, 2


def batch(step: int) -> dict[str, Tensor]:
    """Return ROWS sequences with padding of different lengths."""
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    mask = torch.ones_like(ids)
    mask[:, LENGTH - 3 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def with_large_loss() -> Any:
    model = model_of("router loss")
    model.router_aux_loss_coef = 0.5  # its config says something else, and has no part in the model's forward
    return model


def trained(ctx: RankContext, size: int, accumulation: int, z_loss: float) -> Trained:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 2},
        "expert_parallel": {"size": size, "global_balance_loss": True, "router_z_loss_coef": z_loss},
    }
    engine: Any = launcher.initialize(model=with_large_loss(), config=config, device=DEVICE)[0]
    losses, norms = [], []
    for step in range(STEPS):
        mine = {key: value[ctx.rank :][:1] for key, value in batch(step).items()}
        losses.append(float(engine.train_batch(iter([mine] * accumulation))))
        norms.append(engine.get_global_grad_norm())
    engine.eval()
    plain = model_of("router loss").eval()
    plain.load_state_dict(engine.module.state_dict() if size == 1 else plain.state_dict())
    if size == 1:  # in evaluation it is the model's own
        assert torch.equal(engine(**mine).aux_loss, plain(**mine).aux_loss)
    weights = {name: value for name, value in whole_state(engine).items() if "/" not in name}
    engine.destroy()
    return losses, norms, weights


@cache
def truth(z_loss: float) -> Trained:
    model = with_large_loss().double()

    def loss_of(step: int) -> Tensor:
        given = batch(step)
        found = model(**given)
        counts = given["attention_mask"].flatten().double()
        squares = torch.stack([logits.logsumexp(-1).square() @ counts for logits in found.router_logits])
        loss: Tensor = found.loss + z_loss * squares.mean() / counts.sum()
        return loss

    return plain_steps(model, loss_of, STEPS, LR)


@pytest.mark.key("expert_parallel.global_balance_loss", "expert_parallel.router_z_loss_coef")
@pytest.mark.parametrize(("size", "accumulation", "z_loss"), [(1, 1, 0.0), (2, 1, 0.1), (1, 2, 0.1)])
def test_it_is_that_of_one_large_batch(pool: WorkerPool, size: int, accumulation: int, z_loss: float) -> None:
    """This includes the microbatches of a step, which are all the same here."""
    losses, norms, weights = truth(z_loss)
    for found in pool.run(trained, ROWS, size, accumulation, z_loss):
        assert found[0] == pytest.approx(losses, rel=1e-6)
        assert found[1] == pytest.approx(norms, rel=2e-6)
        for name, value in weights.items():
            assert (found[2][name].double() - value).norm() <= 1e-6 * value.norm(), name


def replayed(ctx: RankContext, every: int) -> list[float]:
    """Return the losses if microbatches differ, and each includes the tokens of the previous ones."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "expert_parallel": {"size": 2, "global_balance_loss": True},
        "replica_check": {"replay_every": every},
    }
    engine: Any = launcher.initialize(model=with_large_loss(), config=config, device=DEVICE)[0]
    rows = [{key: value[ctx.rank :][:1] for key, value in batch(step).items()} for step in range(4)]
    return [float(engine.train_batch(iter(rows[at : at + 2]))) for at in (0, 2)]


def test_a_step_that_is_computed_again_counts_its_tokens_anew(pool: WorkerPool) -> None:
    assert pool.run(replayed, 2, 1) == pool.run(replayed, 2, 0)


def refused(ctx: RankContext, family: str) -> str:
    config = {"train_micro_batch_size_per_gpu": 1, "expert_parallel": {"global_balance_loss": True}}
    with pytest.raises(ConfigError) as error:
        launcher.initialize(model=model_of(family), config=config, device=DEVICE)
    return str(error.value)


def test_a_model_without_such_a_loss_is_told(pool: WorkerPool) -> None:
    assert "does not compute its router loss" in pool.run(refused, 1, "plain")[0]
    assert "has no load-balancing loss" in pool.run(refused, 1, "groups and dense layers")[0]


def test_stages_and_shared_sequences_are_refused() -> None:
    base = {"train_micro_batch_size_per_gpu": 1, "expert_parallel": {"router_z_loss_coef": 0.1}}
    for more, words in (
        ({"pipeline": {"stages": 2}}, "different pipeline stages"),
        ({"sequence_parallel_size": 2}, "whole sequences"),
    ):
        with pytest.raises(ConfigError, match=words):
            load({**base, **more})
