"""`fp8`: linear layers that compute in float8, beside torchao's in one process. `make parity` installs torchao."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from launcher.comm import record_collectives
from launcher.config import load
from launcher.errors import ConfigError
from launcher.models.float8 import use_float8
from tests.pipeline.running import CLIP, LR, advance, config_of, engine_of
from tests.pool import RankContext, WorkerPool
from tests.pool.reference import PlainRun, batch, tiny_gpt2, tiny_llama, train_plain
from tests.tensor.zoo import tiny_model

float8 = pytest.importorskip("torchao.float8")

STEPS, PARTS = 3, 4
CPU = torch.device("cpu")


def llama(tied: bool = False) -> Any:
    """Sizes are multiples of 32: layers are converted at tensor-parallel degree 2, too."""
    return tiny_llama(tied, layers=3, hidden=64, intermediate_size=96)


@cache
def truth(tied: bool = False, recipe: str = "tensorwise", dtype: torch.dtype = torch.float32) -> PlainRun:
    """torchao's own conversion, in plain PyTorch; each microbatch has scales of its own."""
    settings = replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    model = float8.convert_to_float8_training(
        llama(tied), config=settings, module_filter_fn=lambda _, name: name != "lm_head"
    )
    adamw = partial(torch.optim.AdamW, lr=LR, weight_decay=0.1)
    return train_plain(model, batch, adamw, STEPS, PARTS, clip=CLIP, dtype=dtype)


def trained(
    ctx: RankContext, stage: int, parts: int, pipeline: dict[str, Any], tied: bool, sections: dict[str, Any]
) -> list[float]:
    config = config_of(stage, parts, pipeline, **{"fp8": {"enabled": True}, **sections})
    return advance(engine_of(config, llama(tied)), range(STEPS))[0]


@pytest.mark.pairwise
@pytest.mark.key("fp8.enabled")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("more", ["", "checkpointing", "offload"])
def test_stages(pool: WorkerPool, stage: int, tied: bool, world: int, more: str) -> None:
    sections: dict[str, Any] = {"activation_checkpointing": {}} if more == "checkpointing" else {}
    if more == "offload" and stage:
        sections["zero_optimization"] = {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "offload_optimizer": {"device": "cpu"},
        }
    losses = pool.run(trained, world, stage, PARTS // world, {}, tied, sections)[0]
    assert losses == pytest.approx(truth(tied).losses, rel=1e-6)
    assert losses != pytest.approx(plain(tied).losses, rel=1e-5)


@cache
def plain(tied: bool) -> PlainRun:
    adamw = partial(torch.optim.AdamW, lr=LR, weight_decay=0.1)
    return train_plain(llama(tied), batch, adamw, STEPS, PARTS, clip=CLIP)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_pipelines(pool: WorkerPool, schedule: str) -> None:
    losses = pool.run(trained, 2, 1, PARTS, {"stages": 2, "schedule": schedule}, False, {})[0]
    assert losses == pytest.approx(truth().losses, rel=1e-6)


def counted(ctx: RankContext, gathers: bool, nvme: Path | None) -> tuple[list[float], dict[str, int]]:
    config = config_of(
        3, PARTS // 2, {}, bf16={"enabled": True}, fp8={"enabled": True, "all_gather": gathers}
    )
    if nvme is not None:
        config["zero_optimization"]["offload_param"] = {
            "device": "nvme",
            "nvme_path": str(nvme),
            "max_in_cpu": 0,
        }
    engine = engine_of(config, llama())
    losses = advance(engine, range(2))[0]
    with record_collectives() as records:
        losses += advance(engine, [2])[0]
    sent: dict[str, int] = {}
    for record in records:
        if record.op == "all_gather" and record.tag.startswith("model.layers"):
            sent[record.tag] = sent.get(record.tag, 0) + record.nbytes
    return losses, sent


@pytest.mark.key("fp8.all_gather")
@pytest.mark.parametrize("offload", [False, True])
def test_weights_are_sent_in_float8(pool: WorkerPool, tmp_path: Path, offload: bool) -> None:
    """Half of the bytes of bfloat16, the largest magnitudes once per forward, and the very same losses."""
    nvme = tmp_path if offload else None
    (exact, whole), (losses, halves) = (pool.run(counted, 2, gathers, nvme)[0] for gathers in (False, True))
    assert losses == exact
    for layer in ("model.layers.0", "model.layers.1", "model.layers.2"):
        codes, norms = (halves[f"{layer}.{part}/forward"] for part in (0, 1))
        assert 2 * codes + norms == whole[f"{layer}/forward"]
    magnitudes = {tag: size for tag, size in halves.items() if tag.endswith("/magnitudes")}
    assert len(magnitudes) == (3 if offload else 1)
    assert sum(magnitudes.values()) == 2 * 2 * 3 * 7 * 4  # microbatches x ranks x layers x weights x fp32


@pytest.mark.key("fp8.recipe")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_recipes_in_bfloat16(pool: WorkerPool, recipe: str) -> None:
    sections = {"bf16": {"enabled": True}, "fp8": {"enabled": True, "recipe": recipe}}
    found = [pool.run(trained, 2, stage, PARTS // 2, {}, False, sections)[0] for stage in (2, 3)]
    assert found[0] == found[1]
    assert found[0] == pytest.approx(truth(False, recipe, torch.bfloat16).losses, rel=2e-3)


@pytest.mark.parametrize("sequence", [False, True])
def test_split_layers(pool: WorkerPool, sequence: bool) -> None:
    """Scales of rows are powers of 2: a rank that sees only its shard rounds as one process does."""
    parallel = {"autotp_size": 2, "sequence_parallel": sequence}
    sections = {"tensor_parallel": parallel, "fp8": {"enabled": True, "recipe": "rowwise"}}
    losses = pool.run(trained, 2, 1, PARTS, {}, False, sections)[0]
    assert losses == pytest.approx(truth(False, "rowwise").losses, rel=1e-6)


def saved(ctx: RankContext, directory: Path) -> list[float]:
    config = config_of(3, PARTS // 2, {}, fp8={"enabled": True})
    engine = engine_of(config, llama())
    losses = advance(engine, range(2))[0]
    engine.save_checkpoint(directory, "two")
    return losses + advance(engine, [2])[0]


def resumed(ctx: RankContext, directory: Path, sections: dict[str, Any]) -> list[float]:
    engine = engine_of(config_of(1, PARTS, {}, **sections), llama())
    engine.load_checkpoint(directory, "two")
    return advance(engine, [2])[0]


def test_checkpoints_are_those_of_a_run_without_it(pool: WorkerPool, tmp_path: Path) -> None:
    losses = pool.run(saved, 2, tmp_path)[0]
    again = pool.run(resumed, 1, tmp_path, {"fp8": {"enabled": True}})[0]
    assert again == pytest.approx(losses[2:], rel=1e-6)
    without = pool.run(resumed, 1, tmp_path, {})[0]
    assert without == pytest.approx(losses[2:], rel=1e-2)


def section(**keys: Any) -> Any:
    return load({"train_batch_size": 1, "fp8": {"enabled": True, **keys}}).fp8


@pytest.mark.key("fp8.exclude")
def test_which_layers_are_converted() -> None:
    model = tiny_llama(layers=2, hidden=32, intermediate_size=40)  # 40 is no multiple of 16
    used = use_float8(model, section(exclude=["model.layers.0.*", "v_proj"]), CPU)
    assert used == [f"model.layers.1.self_attn.{name}_proj" for name in "qko"]
    kinds = {name: type(model.get_submodule(name)).__name__ for name in used}
    assert set(kinds.values()) == {"Float8Linear"}
    assert type(model.lm_head) is nn.Linear


def test_routers_and_adapters_stay_as_they_are() -> None:
    """Neither what chooses experts, nor the factors of LoRA (their rank is a multiple of 16 here)."""
    experts = tiny_model("dots1", 0).train()
    assert not any("gate" in name.split(".") for name in use_float8(experts, section(), CPU))
    settings = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = use_float8(get_peft_model(llama(), settings), section(), CPU)
    assert len(adapted) == 3 * 7 and all(name.endswith(".base_layer") for name in adapted)


def test_hooks_and_references_stay() -> None:
    model = llama()
    layer = model.model.layers[0].mlp.up_proj
    seen: list[int] = []
    layer.register_forward_hook(lambda *_: seen.append(1))
    use_float8(model, section(), CPU)
    model(input_ids=batch(0))
    assert seen and layer is model.model.layers[0].mlp.up_proj and type(layer) is not nn.Linear


def test_what_cannot_be_converted_is_refused() -> None:
    with pytest.raises(ConfigError, match="no linear layer whose sizes are multiples of 16"):
        use_float8(tiny_gpt2(), section(), CPU)
    with pytest.raises(ConfigError, match="'up_prj' matches no linear layer"):
        use_float8(llama(), section(exclude=["up_prj"]), CPU)
