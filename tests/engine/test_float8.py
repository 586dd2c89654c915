"""`fp8`: linear layers that compute in float8, beside torchao's in one process. `make parity` installs torchao."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import launcher
from launcher.comm import record_collectives
from launcher.config import load
from launcher.errors import ConfigError
from launcher.models import float8 as own
from tests.attack.test_shipped_configs import ROOT, made_material, run
from tests.pipeline.running import CLIP, LR, advance, config_of, engine_of
from tests.pool import RankContext, WorkerPool
from tests.pool.reference import PlainRun, batch, tiny_gpt2, tiny_llama, train_plain
from tests.tensor.running import whole_state
from tests.tensor.zoo import tiny_model

float8 = pytest.importorskip("torchao.float8")

STEPS, PARTS = 3, 4
GATHERED = {"enabled": True, "all_gather": True}
CPU = torch.device("cpu")
EXAMPLE = ROOT / "ds_configs" / "bf16_zero3_fp8.json"


def converted(model: nn.Module, **keys: Any) -> list[str]:
    """Convert a model as the engine does; the names of its converted layers."""
    section = load({"train_batch_size": 1, "fp8": {"enabled": True, **keys}}).fp8
    names = own.float8_layers(model, section)
    own.use_float8(model, names, section.recipe, CPU)
    return names


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
    config = config_of(stage, parts, pipeline, **{"fp8": GATHERED, **sections})
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


@pytest.mark.parametrize("recipe", ["pretrain", "finetune"])
def test_the_example_trains(pool: WorkerPool, tmp_path: Path, recipe: str) -> None:
    lines = run(pool, made_material(tmp_path), tmp_path / "out", recipe, str(EXAMPLE), "--max-steps", "2")
    assert [line["step"] for line in lines if "loss" in line] == [1, 2]


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


@pytest.mark.key("fp8.exclude")
def test_which_layers_are_converted() -> None:
    model = tiny_llama(layers=2, hidden=32, intermediate_size=40)  # 40 is no multiple of 16
    used = converted(model, exclude=["model.layers.0.*", "v_proj"])
    assert used == [f"model.layers.1.self_attn.{name}_proj" for name in "qko"]
    kinds = {name: type(model.get_submodule(name)).__name__ for name in used}
    assert set(kinds.values()) == {"Float8Linear"}
    assert type(model.lm_head) is nn.Linear


@pytest.mark.parametrize("kind", ["dots1", "afmoe", "hunyuan_v1_moe", "jetmoe", "zaya", "gemma4_text"])
def test_routers_stay_as_they_are(kind: str) -> None:
    """What chooses experts, wherever the model keeps it."""
    model = tiny_model(kind, 0)
    for name, module in model.named_modules():  # 16 experts: a size that could be converted
        if type(module) is nn.Linear and {"gate", "router"} & set(name.split(".")):
            module.out_features, module.in_features = 16, 32
    assert not any({"gate", "router"} & set(name.split(".")) for name in converted(model))


def test_adapters_and_the_head_of_a_wrapped_model_stay_as_they_are() -> None:
    settings = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = converted(get_peft_model(llama(), settings))
    assert len(adapted) == 3 * 7 and all(name.endswith(".base_layer") for name in adapted)
    assert len(converted(nn.Sequential(llama()))) == 3 * 7


def test_hooks_and_references_stay() -> None:
    model = llama()
    layer = model.model.layers[0].mlp.up_proj
    seen: list[int] = []
    layer.register_forward_hook(lambda *_: seen.append(1))
    converted(model)
    model(input_ids=batch(0))
    assert seen and layer is model.model.layers[0].mlp.up_proj and type(layer) is not nn.Linear


def test_what_cannot_be_converted_is_refused() -> None:
    with pytest.raises(ConfigError, match="no linear layer whose sizes are multiples of 16"):
        converted(tiny_gpt2())
    with pytest.raises(ConfigError, match="'up_prj' matches no linear layer"):
        converted(llama(), exclude=["up_prj"])
    with pytest.raises(ConfigError, match="leaves none of the 21 linear layers"):
        converted(llama(), exclude=["model.*"])


def test_an_expert_without_tokens_has_no_scale() -> None:
    layers = nn.Sequential(nn.Linear(32, 48, bias=False))
    converted(layers)
    empty = layers(torch.zeros(0, 32, requires_grad=True))
    assert empty.shape == (0, 48)
    empty.sum().backward()
    assert not layers[0].weight.grad.any()


def again(ctx: RankContext, stage: int) -> list[float]:
    """The first losses of engines with and without float8, on one model."""
    model, losses = llama(), []
    for fp8 in ({"enabled": True}, {"enabled": False}, {"enabled": True, "recipe": "rowwise"}):
        losses += advance(engine_of(config_of(stage, PARTS // 2, {}, fp8=fp8), model), [0])[0]
    return losses


@pytest.mark.parametrize("stage", [1, 3])
def test_another_engine_on_the_model(pool: WorkerPool, stage: int) -> None:
    first, second, _ = pool.run(again, 2, stage)[0]
    assert first == pytest.approx(truth().losses[0], rel=1e-6)
    assert type(second) is float and second != first


class ReadsAWeight(nn.Module):
    """A layer that computes with the weight of another one, as Mamba does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.first(x) @ self.second.weight.T).square().mean()


def read(ctx: RankContext, gathers: bool) -> str:
    config = config_of(3, 1, {}, fp8={"enabled": True, "all_gather": gathers})
    engine = engine_of(config, ReadsAWeight())
    try:
        engine(torch.ones(4, 32))
    except ConfigError as error:
        return str(error)
    return ""


def test_a_rounded_weight_is_not_read_in_silence(pool: WorkerPool) -> None:
    assert "read outside of the layer" in pool.run(read, 2, True)[0]
    assert pool.run(read, 2, False)[0] == ""


def looked(ctx: RankContext) -> tuple[float, int]:
    """How far the gathered values are from the shards' between forward and backward, and what an edit changes."""
    engine = engine_of(config_of(3, 1, {}, bf16={"enabled": True}, fp8=GATHERED), llama())
    before = whole_state(engine)
    ids = batch(0).chunk(2)[ctx.rank]
    loss = engine(input_ids=ids, labels=ids).loss
    handle = engine.module.model.layers[2].mlp.up_proj._parameters["weight"]
    with launcher.zero.GatheredParameters([handle], modifier_rank=0):
        seen = handle.detach().float().clone()
        if ctx.rank == 0:
            handle.data[0, 0] = 0.5
    name = "model.layers.2.mlp.up_proj.weight"
    distance = float((seen - before[name].bfloat16().float()).abs().max())
    engine.backward(loss)
    return distance, int((whole_state(engine)[name] != before[name]).sum())


def test_gathered_parameters_are_exact_at_any_time(pool: WorkerPool) -> None:
    assert pool.run(looked, 2)[0] == (0.0, 1)


def freed(ctx: RankContext) -> bool:
    engine = engine_of(config_of(3, 1, {}, fp8=GATHERED), llama())
    advance(engine, [0])
    model = ref(engine.module)
    del engine
    gc.collect()
    return model() is None


def test_nothing_keeps_a_model_alive(pool: WorkerPool) -> None:
    assert pool.run(freed, 2) == [True, True]
