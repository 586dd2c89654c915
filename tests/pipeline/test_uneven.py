"""Variation within a run: lengths of microbatches, and stages that are frozen in part or completely."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from launcher.errors import ConfigError
from launcher.pipeline.sequential.layers import PipelineModule
from tests.pipeline.running import CLIP, LR, config_of, engine_of, whole_weights
from tests.pipeline.test_rows import assert_same, loss_of, row
from tests.pool import RankContext, WorkerPool
from tests.pool.reference import batch, tiny_llama

LENGTHS = [(16, 9, 16, 5), (7, 16, 9, 9)]  # of the microbatches of each step


def microbatches(step: int) -> list[Tensor]:
    return [ids[:, :n] for ids, n in zip(batch(step).chunk(4), LENGTHS[step], strict=True)]


def model_of(kind: str, frozen: Iterable[str] = ()) -> nn.Module:
    """Return a Llama with four blocks, or a sequence of layers; names with this prefix are frozen."""
    if kind == "row":
        return row(True)
    model = tiny_llama(kind == "tied", layers=4)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(frozen)))
    return model


def train(ctx: RankContext, cases: list[tuple[str, list[str], dict[str, Any]]]) -> list[dict[str, Any]]:
    results = []
    for kind, frozen, pipeline in cases:
        stage = pipeline.pop("zero", 1)
        engine = engine_of(config_of(stage, 4, pipeline), model_of(kind, frozen))
        losses, norms = [], []
        for step in range(len(LENGTHS)):
            parts = [
                (ids, ids) if kind == "row" else {"input_ids": ids, "labels": ids}
                for ids in microbatches(step)
            ]
            losses.append(float(engine.train_batch(iter(parts))))
            norms.append(engine.get_global_grad_norm())
        results.append({"losses": losses, "norms": norms, "weights": whole_weights(engine)})
        engine.destroy()
    return results


def truth(kind: str, frozen: list[str]) -> dict[str, Any]:
    model = model_of(kind, frozen)
    model = model.build(0, len(model)) if isinstance(model, PipelineModule) else model
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.1)
    losses, norms = [], []
    for step in range(len(LENGTHS)):
        total = 0.0
        for ids in microbatches(step):
            loss = (loss_of(model(ids), ids) if kind == "row" else model(input_ids=ids, labels=ids).loss) / 4
            loss.backward()
            total += loss.item()
        losses.append(total)
        norms.append(float(nn.utils.clip_grad_norm_(trained, CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "weights": {n: p.detach() for n, p in model.named_parameters()}}


BLOCK = "model.layers."
FIRST_TWO = ["model.embed_tokens", f"{BLOCK}0", f"{BLOCK}1"]
EVEN = {"partition": "uniform"}
CASES: dict[int, list[tuple[str, list[str], dict[str, Any]]]] = {  # by the number of ranks; each is one stage
    2: [
        ("untied", [], {"zero": 3}),
        ("row", [], {}),
        ("untied", FIRST_TWO, {"zero": 3, **EVEN}),  # the first stage
        ("tied", [f"{BLOCK}2", f"{BLOCK}3", "model.norm"], EVEN),  # the second, but for the tied head
        ("untied", FIRST_TWO, {"schedule": "interleaved", "reduce_per_microbatch": True, "zero": 2, **EVEN}),
    ],
    4: [
        ("untied", [f"{BLOCK}1"], EVEN),  # a stage between others
        ("tied", ["model.embed_tokens", f"{BLOCK}0", f"{BLOCK}2"], {"zero": 3, **EVEN}),
    ],
}


@pytest.mark.parametrize("ranks", CASES)
def test_uneven_runs_are_those_of_one_process(pool: WorkerPool, ranks: int) -> None:
    cases = [(kind, frozen, {"stages": ranks, **pipeline}) for kind, frozen, pipeline in CASES[ranks]]
    wanted = [truth(kind, frozen) for kind, frozen, _ in cases]
    for found in pool.run(train, ranks, cases):
        for got, want in zip(found, wanted, strict=True):
            assert_same(got, want)


def recomputed(ctx: RankContext) -> tuple[list[str], str]:
    """Return the names of recomputed blocks with interval 1, and the message for interval 2."""
    engine = engine_of(
        config_of(0, 4, {"stages": 2, "activation_checkpoint_interval": 1}), model_of("untied")
    )
    names = list(engine.checkpointer.names)
    engine.destroy()
    with pytest.raises(ConfigError) as error:
        engine_of(config_of(0, 4, {"stages": 2, "activation_checkpoint_interval": 2}), model_of("untied"))
    return names, str(error.value)


@pytest.mark.key("pipeline.activation_checkpoint_interval")
def test_blocks_are_recomputed_one_by_one(pool: WorkerPool) -> None:
    names = []
    for of_rank, refused in pool.run(recomputed, 2):
        names += of_rank
        assert "calls its blocks one by one" in refused and "activation_checkpointing" in refused
    assert sorted(names) == [f"{BLOCK}{i}" for i in range(4)]
