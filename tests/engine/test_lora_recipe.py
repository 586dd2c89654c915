"""What `finetune --lora` does: adapters on stored weights, their files, resuming without the weights, and merging."""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import launcher
from launcher.checkpoint.hub_model import write_model
from launcher.checkpoint.source import SourceCheckpoint
from launcher.cli.recipes import check_flags
from launcher.engine.adapter_files import export_adapters
from launcher.engine.background_saves import written_bytes
from launcher.engine.report import parameters
from launcher.engine.weights import model_with_source
from launcher.errors import CheckpointError, ConfigError
from launcher.models.adapters import LoraSettings, with_adapters
from launcher.models.build import load_config
from tests.pipeline.running import CLIP, LR, advance, config_of
from tests.pool import RankContext, WorkerPool
from tests.pool.reference import batch, tiny_gpt2, tiny_llama, train_plain

STEPS, PARTS = 3, 4
EXPERTS: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 4,
    "num_experts_per_tok": 2, "pad_token_id": None,
}  # fmt: skip
MODELS: dict[str, Any] = {
    "llama": partial(tiny_llama, layers=4),
    "llama, tied": partial(tiny_llama, tied=True, layers=4),
    "gpt2": partial(tiny_gpt2, layers=2),
}


def stored(kind: str, directory: Path) -> Path:
    """Write the model's weights; return their directory."""
    place = directory / kind
    if not place.exists():
        MODELS[kind]().save_pretrained(place)
    return place


def engine_of(base: Path, config: dict[str, Any], lora: LoraSettings) -> Any:
    made = model_with_source(load_config(str(base)), str(base), from_scratch=False, seed=7, lora=lora)
    engine, *_ = launcher.initialize(
        model=made.model, source=made.source, config=config, device=torch.device("cpu"), seed=7
    )
    return engine


def trained(ctx: RankContext, base: Path, config: dict[str, Any], lora: LoraSettings, out: Path) -> Any:
    engine = engine_of(base, config, lora)
    export_adapters(engine, out / "before", str(base))
    record = advance(engine, range(STEPS))
    export_adapters(engine, out / "after", str(base))
    engine.save_checkpoint(
        out / "checkpoints",
        client_state={"lora": asdict(lora)},
        exclude_frozen_parameters=True,
    )
    return record


def plain(base: Path, adapters: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(base, use_cache=False)
    return PeftModel.from_pretrained(model, adapters, is_trainable=True)


def logits(model: PreTrainedModel | PeftModel) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=batch(0)).logits
    return found


CASES = [
    ("llama", 1, 2, {}, LoraSettings.of(4)),
    ("llama, tied", 2, 3, {}, LoraSettings.of(4, alpha=3)),
    ("llama, tied", 2, 2, {"tensor_parallel": {"autotp_size": 2}}, LoraSettings.of(4)),
    ("llama", 2, 1, {"pipeline": {"stages": 2}}, LoraSettings.of(4, "q_proj, down_proj")),
    ("gpt2", 2, 3, {}, LoraSettings.of(2)),
]


@pytest.mark.parametrize(("kind", "world", "stage", "axes", "lora"), CASES)
def test_as_peft_in_one_process(
    pool: WorkerPool,
    tmp_path: Path,
    kind: str,
    world: int,
    stage: int,
    axes: dict[str, Any],
    lora: LoraSettings,
) -> None:
    base = stored(kind, tmp_path)
    config = config_of(stage, PARTS, **{"pipeline": {}, **axes})
    losses, norms = pool.run(trained, world, base, config, lora, tmp_path)[0]

    # The adapters start as those of PEFT: they change nothing.
    before = plain(base, tmp_path / "before")
    assert torch.equal(logits(before), logits(AutoModelForCausalLM.from_pretrained(base)))
    adamw = partial(torch.optim.AdamW, lr=LR, weight_decay=0.1)
    truth = train_plain(before.train(), batch, adamw, STEPS, PARTS, clip=CLIP)
    assert losses == pytest.approx(truth.losses, rel=2e-6)
    assert norms == pytest.approx(truth.grad_norms, rel=3e-5)

    # PEFT reads the result, and `launch export` merges it into the weights.
    after = logits(plain(base, tmp_path / "after"))
    assert torch.allclose(after, logits(before), atol=2e-5)
    write_model(SourceCheckpoint.open(tmp_path / "checkpoints"), str(base), tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.allclose(logits(merged), after, atol=2e-5)
    assert not torch.allclose(after, logits(AutoModelForCausalLM.from_pretrained(base)), atol=1e-3)


@pytest.mark.parametrize(("world", "stage"), [(1, 2), (2, 3)])
def test_adapters_of_experts(pool: WorkerPool, tmp_path: Path, world: int, stage: int) -> None:
    """PEFT adapts the matrices of experts, too: they are one parameter each."""
    torch.manual_seed(0)
    experts().save_pretrained(tmp_path / "base")
    lora = LoraSettings.of(2)
    losses, _ = pool.run(trained, world, tmp_path / "base", config_of(stage, PARTS, {}), lora, tmp_path)[0]
    before = plain(tmp_path / "base", tmp_path / "before").train()
    factors = [name for name, p in before.named_parameters() if p.requires_grad and ".experts." in name]
    assert len(factors) == 8
    adamw = partial(torch.optim.AdamW, lr=LR, weight_decay=0.1)
    assert losses == pytest.approx(
        train_plain(before, batch, adamw, STEPS, PARTS, clip=CLIP).losses, rel=2e-6
    )
    after = plain(tmp_path / "base", tmp_path / "after")
    write_model(SourceCheckpoint.open(tmp_path / "checkpoints"), str(tmp_path / "base"), tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.allclose(logits(merged), logits(after), atol=2e-5)


def test_what_cannot_be_merged_is_refused(pool: WorkerPool, tmp_path: Path) -> None:
    base, lora = stored("llama, tied", tmp_path), LoraSettings.of(2, "embed_tokens,q_proj")
    pool.run(trained, 1, base, config_of(0, 4, {}), lora, tmp_path)
    found = SourceCheckpoint.open(tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight is tied to another layer"):
        write_model(found, str(base), tmp_path / "merged")
    with pytest.raises(CheckpointError, match="does not match the model"):
        write_model(found, str(stored("llama", tmp_path)), tmp_path / "merged")
    (tmp_path / "bare").mkdir()
    load_config(str(base)).save_pretrained(tmp_path / "bare")
    with pytest.raises(CheckpointError, match="it has no weights"):
        write_model(found, str(tmp_path / "bare"), tmp_path / "merged")


def run_recipe(ctx: RankContext, directory: Path, output: str, *arguments: str) -> str:
    """Run `finetune`; return its error, or nothing."""
    flags = [*("--model", str(directory / "llama"), "--dataset", str(directory / "rows.jsonl")), *arguments]
    flags += ["--seq-length", "24", "--output-dir", str(directory / output), "--device", "cpu"]
    json_file = directory / "ds.json"
    recipe = str(Path(launcher.__file__).parent.parent / "recipes" / "finetune.py")
    with patch.dict(os.environ, LAUNCHER_CONFIG=str(json_file)), patch.object(sys, "argv", [recipe, *flags]):
        try:
            runpy.run_path(recipe, run_name="__main__")
        except ConfigError as error:
            return str(error)
    return ""


def test_the_recipe_resumes_without_the_weights_in_its_checkpoint(pool: WorkerPool, tmp_path: Path) -> None:
    tiny_llama(vocab=260, layers=2).save_pretrained(tmp_path / "llama")
    rows = [{"prompt": f"after {n}? ", "completion": f"{n + 1}"} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = {"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2}}
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 2, **section}))
    adapters = ("--lora", "4", "--lora-targets", "q_proj,v_proj")
    assert not any(
        pool.run(run_recipe, 2, tmp_path, "run", *adapters, "--max-steps", "4", "--save-every", "2")
    )
    run = tmp_path / "run"
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = SourceCheckpoint.open(run / "checkpoints", "global_step2")
    assert found.shapes.keys() and all("lora_" in name for name in found.shapes)
    assert {path.name for path in (run / "model").iterdir()} >= {
        "adapter_model.safetensors", "adapter_config.json", "tokenizer.json",
    }  # fmt: skip

    again = ("--max-steps", "4", "--resume", str(run / "checkpoints" / "global_step2"))
    says = pool.run(run_recipe, 2, tmp_path, "again", *again, "--lora", "4")[0]
    assert "this run has LoRA adapters with rank 4, targets all-linear, alpha 8" in says
    assert "but this run has none" in pool.run(run_recipe, 2, tmp_path, "again", *again)[0]
    assert not any(pool.run(run_recipe, 2, tmp_path, "again", *again, *adapters))
    resumed = [
        json.loads(line)["loss"] for line in (tmp_path / "again" / "metrics.jsonl").read_text().splitlines()
    ]
    assert resumed[-2:] == losses[-2:]

    # Packed documents stay separate under PEFT's wrapper, too.
    packed = ("--max-steps", "2", "--packed")
    assert not any(pool.run(run_recipe, 1, tmp_path, "packed", *adapters, *packed))

    # The same names and shapes, but other values.
    tiny_llama(vocab=260, layers=2, seed=1).save_pretrained(tmp_path / "llama")
    says = pool.run(run_recipe, 1, tmp_path, "other", *again, *adapters)[0]
    assert "belong to other weights" in says and not (tmp_path / "other" / "flags.json").exists()
    with pytest.raises(CheckpointError, match="they belong to other weights"):
        write_model(found, str(tmp_path / "llama"), tmp_path / "merged")


def copied(ctx: RankContext, base: Path, config: dict[str, Any]) -> tuple[int, int, int, int]:
    """Return the bytes of a save with and without frozen weights, and the numbers of frozen and trained weights."""
    engine = engine_of(base, config, LoraSettings.of(2))
    advance(engine, range(1))
    every, trained = parameters(engine), parameters(engine, trained=True)
    return *(written_bytes(engine, frozen=frozen) for frozen in (True, False)), every - trained, trained


@pytest.mark.parametrize("stage", [0, 3])
def test_background_saves_copy_no_frozen_weights(pool: WorkerPool, tmp_path: Path, stage: int) -> None:
    base = stored("llama", tmp_path)
    found = pool.run(copied, 2, base, config_of(stage, PARTS, {}))
    whole, without, frozen, trained = sum(of[0] for of in found), sum(of[1] for of in found), *found[0][2:]
    assert without == pytest.approx(3 * 4 * trained, rel=0.02)  # weights and two states of Adam
    assert whole - without == 4 * frozen


def test_flags_of_adapters_need_a_rank() -> None:
    """`launch` tells before it starts a rank."""
    recipe = Path(launcher.__file__).parent.parent / "recipes" / "finetune.py"
    with pytest.raises(ConfigError, match="--lora-alpha requires --lora"):
        check_flags(recipe, ["--model", "m", "--dataset", "d", "--lora-alpha", "4"])


def test_every_target_must_be_a_layer(tmp_path: Path) -> None:
    """PEFT adapts those that it finds, and says nothing of the others."""
    base = stored("llama", tmp_path)
    with pytest.raises(ConfigError, match=r"no layer q_prj[^!]*q_proj, up_proj"):
        engine_of(base, config_of(0, 4, {}), LoraSettings.of(2, "q_prj,v_proj"))


def experts() -> Qwen3MoeForCausalLM:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**EXPERTS))


def test_experts_are_adapted_by_the_names_of_their_layers_on_the_hub() -> None:
    adapted: Any = with_adapters(experts(), LoraSettings.of(2, "gate_proj,up_proj,down_proj"))
    assert adapted.peft_config["default"].target_parameters == {"gate_up_proj", "down_proj"}
    with pytest.raises(ConfigError, match="no layer up_prj"):
        with_adapters(experts(), LoraSettings.of(2, "gate_proj,up_proj,up_prj"))


def test_dropout_in_adapters_of_experts() -> None:
    with pytest.raises(ConfigError, match=r"cannot have dropout[^!]*--lora-dropout"):
        with_adapters(experts(), LoraSettings.of(2, dropout=0.1))


def refused(ctx: RankContext, base: Path, sections: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        engine_of(base, config_of(0, PARTS, **{"pipeline": {}, **sections}), LoraSettings.of(2))
    return str(error.value)


@pytest.mark.parametrize(
    ("world", "sections", "words"),
    [
        (2, {"tensor_parallel": {"autotp_size": 2}}, "adapters of single parameters"),
        (2, {"tensor_parallel": {"autotp_size": 2}, "expert_parallel": {"size": 2}}, "single parameters"),
        (1, {"expert_parallel": {"bias_update_rate": 0.1}}, "files of adapters would not have their changes"),
    ],
)
def test_what_adapters_of_experts_do_not_support(
    pool: WorkerPool, tmp_path: Path, world: int, sections: dict[str, Any], words: str
) -> None:
    torch.manual_seed(0)
    experts().save_pretrained(tmp_path / "base")
    for said in pool.run(refused, world, tmp_path / "base", sections):
        assert words in said


def test_targets_are_a_set() -> None:
    flags = argparse.Namespace(lora=4, lora_targets="v_proj, q_proj,v_proj")
    assert LoraSettings.of_flags(flags) == LoraSettings.of(4, "q_proj,v_proj", alpha=8)
