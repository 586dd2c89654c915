"""Sequence parallelism with other features: adapters, other degrees on resume, evaluation, generation, schedules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

import launcher
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE
from tests.sequence.families import BATCHES, model_of
from tests.sequence.test_parity import LR, Case, check
from tests.tensor.running import whole_state

SHARED = {"context_parallel": {"ring": 2}}


def config_of(stage: int = 2, **sections: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "eps": 1e-4}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **sections,
    }


def engine_of(model: Any, **sections: Any) -> Any:
    return launcher.initialize(model=model, config=config_of(**sections), device=DEVICE)[0]


# ---- adapters ---------------------------------------------------------------------------------------


def with_adapters() -> Any:
    torch.manual_seed(7)
    return get_peft_model(
        model_of("grouped"), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )


def adapted(ctx: RankContext) -> tuple[list[float], dict[str, Tensor]]:
    engine = engine_of(with_adapters(), stage=3, **SHARED, activation_checkpointing={})
    losses = []
    for step in range(2):
        loss = engine(**BATCHES["packed"](step, 23)).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    weights = {
        name: value for name, value in whole_state(engine).items() if "lora" in name and "/" not in name
    }
    engine.destroy()
    return losses, weights


def test_adapters_are_those_of_one_process(pool: WorkerPool) -> None:
    model = with_adapters()
    mine = [p for p in model.parameters() if p.requires_grad]
    adamw, losses = torch.optim.AdamW(mine, LR, eps=1e-4, weight_decay=0.0), []
    for step in range(2):
        loss = model(**BATCHES["packed"](step, 23)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(mine, 1.0)
        adamw.step()
        adamw.zero_grad()
        losses.append(loss.item())
    for found in pool.run(adapted, 2):
        assert found[0] == pytest.approx(losses, rel=1e-6)
        for name, value in model.named_parameters():
            if value.requires_grad:
                torch.testing.assert_close(found[1][name], value.detach(), rtol=1e-5, atol=1e-6)


# ---- checkpoints ------------------------------------------------------------------------------------


def saved(ctx: RankContext, directory: Path) -> dict[str, Tensor]:
    engine = engine_of(model_of("grouped"), **SHARED)
    engine.train_batch(iter([BATCHES["plain"](0, 24)]))
    engine.save_checkpoint(directory)
    state = whole_state(engine)
    engine.destroy()
    return state


def loaded(ctx: RankContext, directory: Path, sections: dict[str, Any]) -> tuple[dict[str, Tensor], float]:
    engine = engine_of(model_of("grouped"), **sections)
    engine.load_checkpoint(directory)
    state = whole_state(engine)
    loss = float(engine.train_batch(iter([BATCHES["plain"](1, 24)])))
    engine.destroy()
    return state, loss


def test_checkpoints_go_to_other_degrees_bit_for_bit(pool: WorkerPool, tmp_path: Path) -> None:
    """cp 2 -> one rank, tp 2, and Ulysses at stage 3; the next loss is equal on each."""
    wanted = pool.run(saved, 2, tmp_path)[0]
    losses = []
    for world, sections in (
        (1, {}),
        (2, {"tensor_parallel": {"autotp_size": 2}, "stage": 1}),
        (2, {"sequence_parallel_size": 2, "stage": 3}),
    ):
        state, loss = pool.run(loaded, world, tmp_path, sections)[0]
        losses.append(loss)
        assert state.keys() == wanted.keys()
        assert all(torch.equal(state[name], value) for name, value in wanted.items())
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


# ---- evaluation, generation, another engine -----------------------------------------------------------


def looked_at(ctx: RankContext) -> dict[str, Any]:
    model = model_of("grouped")
    engine = engine_of(model, stage=3, **SHARED)
    batch = BATCHES["left padded"](0, 23)
    found: dict[str, Any] = {"evaluated": float(engine.eval_batch(iter([batch])))}
    engine.eval()
    with torch.no_grad():
        found["generated"] = engine.module.generate(
            batch["input_ids"][:, :9], attention_mask=torch.ones(2, 9), max_new_tokens=6, do_sample=False
        ).tolist()
    engine.destroy()
    again = engine_of(model, stage=0)  # each rank has whole sequences of its own
    found["again"] = float(again(**BATCHES["plain"](ctx.rank, 23)).loss)
    again.destroy()
    found["attention"] = model.config._attn_implementation
    return found


def test_evaluation_generation_and_another_engine(pool: WorkerPool) -> None:
    model = model_of("grouped").eval()
    batch = BATCHES["left padded"](0, 23)
    with torch.no_grad():
        loss = float(model(**batch).loss)
        tokens = model.generate(
            batch["input_ids"][:, :9], attention_mask=torch.ones(2, 9), max_new_tokens=6, do_sample=False
        )
        alone = [float(model(**BATCHES["plain"](rank, 23)).loss) for rank in range(2)]
    for rank, found in enumerate(pool.run(looked_at, 2)):
        assert found["evaluated"] == pytest.approx(loss, rel=1e-6)
        assert found["generated"] == tokens.tolist()
        assert found["again"] == pytest.approx(alone[rank], rel=1e-6)
        assert found["attention"] == "sdpa"


# ---- schedules and slices of tp -------------------------------------------------------------------------

TWICE = ("gradient_accumulation_steps", 2)
OTHERS = [
    *(
        (Case(1, 2, stage=1, more=(("pipeline", {"stages": 2, "schedule": name}), TWICE)), 4)
        for name in ("gpipe", "interleaved", "zb-h1", "zbv")
    ),
    (Case(2, 1, stage=2, length=24, more=(("tensor_parallel", {"autotp_size": 2, "sequence_parallel": True}),)), 4),
    (Case(1, 2, stage=2, more=(("zero_optimization", {"stage": 2, "offload_optimizer": {"device": "cpu"}}),)), 2),
    (Case(2, 1, more=(("activation_checkpointing", {"cpu_checkpointing": True}), ("tiled_mlp", True))), 2),
]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "world"),
    [OTHERS[4], *(pytest.param(*row, marks=pytest.mark.full) for row in (*OTHERS[:4], *OTHERS[5:]))],
)
def test_other_ways_to_run(pool: WorkerPool, case: Case, world: int) -> None:
    check(pool, "deep" if "interleaved" in str(case) or "zbv" in str(case) else "grouped", case, world)
