"""`loss_normalization: "tokens"`: the loss of a step is the mean over its tokens, for any split into microbatches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import launcher
from launcher.errors import ConfigError
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE
from tests.sequence.families import BATCHES, model_of
from tests.tensor.running import whole_state

LR, NUMBER = 0.05, 2
WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp": (2, {}),
    "stages": (2, {"pipeline": {"stages": 2}}),
    "shared": (4, {"sequence_parallel_size": 2}),
    "tp": (2, {"tensor_parallel": {"autotp_size": 2}, "tiled_loss": True}),
}


def batch_of(number: int) -> dict[str, Tensor]:
    """Return batches with different lengths and masks; the very last one has no loss tokens."""
    batch = BATCHES["left padded"](number, 24 - 5 * number)
    labels = batch["labels"].clone()
    labels[:, : 3 * number] = -100
    return {**batch, "labels": labels if number < 3 else torch.full_like(labels, -100)}


def config_of(**sections: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": NUMBER,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_optimization": {"stage": 1},
        "gradient_clipping": 0.0,
        "loss_normalization": "tokens",
        **sections,
    }


def trained(ctx: RankContext, sections: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    engine: Any = launcher.initialize(model=model_of("grouped"), config=config_of(**sections), device=DEVICE)[
        0
    ]
    rank = engine.mesh.dp.rank
    mine = [batch_of(NUMBER * rank + at) for at in range(NUMBER)]
    losses = [float(engine.eval_batch(iter(mine))), float(engine.train_batch(iter(mine)))]
    weights = {name: value for name, value in whole_state(engine).items() if "/" not in name}
    engine.destroy()
    return losses, weights


@pytest.mark.key("loss_normalization")
@pytest.mark.parametrize(
    "way", ["dp", *(pytest.param(way, marks=pytest.mark.full) for way in WAYS if way != "dp")]
)
def test_every_token_counts_the_same(pool: WorkerPool, way: str) -> None:
    world, sections = WAYS[way]
    model, total = model_of("grouped"), 0
    for number in range(NUMBER * (2 if way in ("dp", "shared") else 1)):
        batch = batch_of(number)
        total += int((batch["labels"][:, 1:] != -100).sum())
    loss = torch.zeros(())
    for number in range(NUMBER * (2 if way in ("dp", "shared") else 1)):
        loss = loss + model(**batch_of(number), num_items_in_batch=torch.tensor(total)).loss
    loss.backward()
    torch.optim.SGD(model.parameters(), LR).step()
    for losses, weights in pool.run(trained, world, sections):
        assert losses == pytest.approx([loss.item()] * 2, rel=1e-6)
        for name, value in model.named_parameters():
            torch.testing.assert_close(weights[name], value.detach(), rtol=1e-5, atol=1e-7)


def test_one_microbatch_alone_is_refused(pool: WorkerPool) -> None:
    pool.run(refused, 1)


def refused(ctx: RankContext) -> None:
    engine: Any = launcher.initialize(model=model_of("grouped"), config=config_of(), device=DEVICE)[0]
    with pytest.raises(ConfigError, match="sees one microbatch at a time"):
        engine.backward(engine(**batch_of(0)).loss)
    with pytest.raises(ConfigError, match='has no "labels"'):
        engine.train_batch(iter([{"input_ids": torch.zeros(2, 4, dtype=torch.int64)}] * NUMBER))
    engine.destroy()
