"""Which parameters Muon steps, with which options; and torch's own Muon as the caller's optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from launcher.errors import ConfigError
from tests.engine.driving import STAGES, advance, config_of, engine_of, truth, whole_weights
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE
from tests.pool.reference import batch, share, tiny_llama
from tests.zero.models import stack

LR = {"muon_lr": 0.03, "adam_lr": 0.002, "weight_decay": 0.1}


def split_of(ctx: RankContext, how: str) -> list[tuple[bool, float, float, list[str]]]:
    """Return use_muon, lr, weight decay and names of each group, of a tiny Llama, or of a Stack with param groups."""
    given: dict[str, Any] = {}
    model: Any = stack() if how == "groups" else tiny_llama(layers=1)
    if how == "groups":
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() <= 1]
        model.last.weight.use_muon = False
        head = model.last.weight
        given["model_parameters"] = [
            {"params": [p for p in matrices if p is not head], "weight_decay": 0.3},
            {"params": [*vectors, head], "weight_decay": 0.0, "lr": 0.5},
        ]
    engine = engine_of(config_of(3, optimizer={"type": "Muon", "params": LR}), model, **given)
    groups = engine.optimizer.param_groups
    assert [group["lr"] for group in groups] == engine.get_lr()
    names: list[list[str]] = [[] for _ in groups]
    for name, index in engine.optimizer._group_of.items():
        names[index].append(name)
    return [(g["use_muon"], g["lr"], g["weight_decay"], names[i]) for i, g in enumerate(groups)]


@pytest.mark.key("optimizer.type", "optimizer.params.muon_lr", "optimizer.params.adam_lr")
def test_matrices_inside_of_a_model_are_muons(pool: WorkerPool) -> None:
    (use, lr, _, matrices), (use_too, adam_lr, _, rest) = pool.run(split_of, 1, "llama")[0]
    assert (use, lr, use_too, adam_lr) == (True, 0.03, False, 0.002)
    assert len(matrices) == 7 and all("proj" in name for name in matrices)
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} < set(rest)


def test_param_groups_are_split_and_keep_their_options(pool: WorkerPool) -> None:
    groups = pool.run(split_of, 1, "groups")[0]
    assert [group[:3] for group in groups] == [(True, 0.03, 0.3), (False, 0.5, 0.0)]
    assert "last.weight" in groups[1][3]  # its own use_muon says no


def on_llama(ctx: RankContext, stage: int, kind: str, extra: dict[str, Any]) -> list[float]:
    """Train a tiny Llama with small persistent parameters, in bf16 if `extra` sets it."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 64}
    config = config_of(
        stage, optimizer={"type": kind, "params": {"lr": 0.01}}, zero_optimization=zero, **extra
    )
    model = tiny_llama(layers=2)
    import launcher

    engine = launcher.initialize(model=model, config=config, device=DEVICE)[0]
    losses = []
    for step in range(4):
        total = 0.0
        for ids in share(batch(step, 8), ctx.rank, ctx.world, 1):
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            total += float(loss)
        losses.append(total)
    return losses


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", ["Muon", "Lamb", "Lion"])
@pytest.mark.parametrize(
    "extra", [{"bf16": {"enabled": True}}, {"gradient_clipping": 0.1}], ids=["bf16", "clip"]
)
def test_stages_agree_on_a_llama(pool: WorkerPool, kind: str, extra: dict[str, Any]) -> None:
    """bf16 sums in another order round differently."""
    rel = 2e-2 if "bf16" in extra else 1e-5
    runs = [
        [sum(both) for both in zip(*pool.run(on_llama, 2, stage, kind, extra), strict=True)]
        for stage in STAGES
    ]
    for losses in runs:
        assert losses == pytest.approx(runs[0], rel=rel)
        assert losses[-1] < losses[0]


# ---- the caller's torch.optim.Muon --------------------------------------------------------------


def matrices_of(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() == 2]


OPTIONS: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"}


def with_torchs(ctx: RankContext, stage: int) -> tuple[list[float], dict[str, Tensor], str]:
    model = stack()
    muon = torch.optim.Muon(matrices_of(model), **OPTIONS)
    schedule = torch.optim.lr_scheduler.StepLR(muon, 2, 0.5)
    engine = engine_of(config_of(stage, optimizer=None), model, optimizer=muon, lr_scheduler=schedule)
    return advance(engine, ctx, range(4)), whole_weights(engine), engine.get_type()[0]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [1, 2])
def test_torchs_muon(pool: WorkerPool, stage: int, world: int) -> None:
    """torch iterates in bfloat16: rounded sums over two ranks differ in the last digits."""
    model = stack()
    muon = torch.optim.Muon(matrices_of(model), **OPTIONS)
    schedule, losses = torch.optim.lr_scheduler.StepLR(muon, 2, 0.5), []
    for step in range(4):
        losses += truth(muon, model, [step])
        schedule.step()
    got, weights, kind = pool.run(with_torchs, world, stage)[0]
    assert kind == "Muon"
    assert got == pytest.approx(losses, rel=1e-5 if world == 1 else 2e-3)
    for name, value in model.named_parameters():
        torch.testing.assert_close(
            weights[name], value.detach(), rtol=1e-4, atol=1e-5 if world == 1 else 2e-3
        )


def with_adafactor(ctx: RankContext) -> str:
    model = stack()
    with pytest.raises(ConfigError) as caught:
        engine_of(config_of(3), model, optimizer=torch.optim.Adafactor(model.parameters()))
    return str(caught.value)


def test_adafactor_is_refused(pool: WorkerPool) -> None:
    assert "Adafactor is not elementwise" in pool.run(with_adafactor, 1)[0]
