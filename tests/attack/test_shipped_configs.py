"""Every JSON of ds_configs/ trains with every recipe that supports it.

The Trainer rejects numbers that differ from its own, so its recipe uses the JSON with "auto" values;
tests/integrations/test_recipe.py trains that.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from transformers import MixtralConfig, MixtralForCausalLM

from launcher.cli.main import main
from launcher.config import load
from launcher.config.resolve import complete
from tests.pool import RankContext, WorkerPool
from tests.pool.reference import tiny_llama

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "ds_configs").glob("*.json"))
QUICK = {("pretrain", "hf_zero3"), ("pretrain", "3d"), ("finetune", "fp16_zero1")}
STEPS, LENGTH, VOCABULARY = 2, 32, 260


def trained(ctx: RankContext, recipe: str, config: str, output: str, *flags: str) -> None:
    """Run the recipe like a rank of `launch`."""
    os.environ |= {"LAUNCHER_CONFIG": config, "LAUNCHER_OUTPUT_DIR": output, "LAUNCHER_DEVICE": "cpu"}
    with patch.object(sys, "argv", [recipe, *flags]):
        runpy.run_path(str(ROOT / "recipes" / f"{recipe}.py"), run_name="__main__")


def metrics(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_material(tmp_path_factory.mktemp("material"))


def made_material(directory: Path) -> Path:
    """Create a tiny model and texts."""
    model = tiny_llama(vocab=VOCABULARY, layers=2)
    model.save_pretrained(directory / "model")
    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    mixture = MixtralConfig(vocab_size=VOCABULARY, num_hidden_layers=2, num_local_experts=4, **sizes)
    MixtralForCausalLM(mixture).save_pretrained(directory / "mixture")
    (directory / "prose.txt").write_text("".join(f"{n} is followed by {n + 1}.\n" for n in range(400)))
    rows = [{"prompt": f"after {n}?", "completion": f" {n + 1}"} for n in range(40)]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def run(
    pool: WorkerPool, material: Path, output: Path, recipe: str, config: str, *flags: str, ranks: int = 2
) -> list[dict[str, Any]]:
    data = material / ("prose.txt" if recipe == "pretrain" else "rows.jsonl")
    model = "mixture" if load(config).expert_parallel.degree > 1 else "model"
    common = ("--model", str(material / model), "--dataset", str(data), "--seq-length", str(LENGTH))
    pool.run(trained, ranks, recipe, config, str(output), *common, *flags)
    return metrics(output)


CASES = [
    pytest.param(recipe, path.stem, marks=[] if (recipe, path.stem) in QUICK else [pytest.mark.full])
    for recipe in ("pretrain", "finetune")
    for path in FILES
    if not load(path).fp8.enabled  # needs torchao: tests/engine/test_float8.py
]


@pytest.mark.parametrize(("recipe", "stem"), CASES)
def test_every_file_trains_under_every_recipe(
    pool: WorkerPool, material: Path, tmp_path: Path, recipe: str, stem: str
) -> None:
    path = ROOT / "ds_configs" / f"{stem}.json"
    config = load(path)
    ranks = max(2, config.pipeline.degree * config.tensor_parallel.degree * config.cp_degree)
    lines = run(pool, material, tmp_path, recipe, str(path), "--max-steps", str(STEPS), ranks=ranks)
    assert [line["step"] for line in lines] == [1, 2] and all(line["loss"] > 0 for line in lines)
    resolved = json.loads((tmp_path / "config.json").read_text())
    assert resolved["optimizer"]["type"] == "AdamW" and resolved["scheduler"] is not None


def test_a_json_without_an_optimizer_gets_the_recipes(
    pool: WorkerPool, material: Path, tmp_path: Path
) -> None:
    flags = ("--learning-rate", "0.02", "--weight-decay", "0.3", "--warmup-steps", "3", "--batch-size", "6")
    config = '{"train_micro_batch_size_per_gpu": "auto"}'
    lines = run(pool, material, tmp_path, "pretrain", config, "--max-steps", "6", *flags)
    resolved = json.loads((tmp_path / "config.json").read_text())
    params = resolved["optimizer"]["params"]
    assert (resolved["optimizer"]["type"], params["lr"], params["weight_decay"]) == ("AdamW", 0.02, 0.3)
    assert resolved["scheduler"]["params"]["warmup_num_steps"] == 3
    assert (resolved["train_batch_size"], resolved["train_micro_batch_size_per_gpu"]) == (6, 3)
    rates = [line["lr"] for line in lines]
    assert rates[0] == 0 and 0.01 < max(rates) <= 0.02 and rates[-1] < max(rates)
    assert [line["tokens"] for line in lines] == [6 * LENGTH * step for step in range(1, 7)]


def test_a_flag_fills_what_says_auto_and_what_is_left_out() -> None:
    written = {
        "train_batch_size": "auto",
        "optimizer": {"type": "SGD", "params": {"lr": "auto"}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"},
        },
    }
    flags = {"--learning-rate": 0.5, "--weight-decay": 0.1, "--warmup-steps": 7, "--batch-size": 8}
    config = complete(load(written), flags).resolve(dp_degree=4, auto={"scheduler.params.total_num_steps": 9})
    assert config.optimizer is not None and config.scheduler is not None
    assert config.optimizer.params.lr == 0.5 and config.optimizer.params.weight_decay == 0.1
    params = config.scheduler.params.to_dict()
    assert (params["warmup_max_lr"], params["warmup_num_steps"]) == (0.5, 7)
    assert config.train_batch_size == 8
    told = {auto.path: auto.why for auto in config.resolved_autos}
    assert told["optimizer.params.lr"] == "--learning-rate" and told["train_batch_size"] == "--batch-size"


def test_no_schedule_is_brought_beside_an_optimizer_of_the_json() -> None:
    written = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    assert complete(load(written), {}).scheduler is None
    assert any("the learning rate is constant" in note.what for note in complete(load(written), {}).notes)
    scheduled = complete(load(written), {"--warmup-steps": 3}).scheduler
    assert scheduled is not None and scheduled.type == "WarmupCosineLR"


CONTRADICTIONS = [
    ({"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}, "--learning-rate", "0.2", "optimizer.params.lr: is 0.1"),
    ({"optimizer": {"type": "Muon", "params": {"adam_lr": 0.1}}}, "--learning-rate", "0.2", "adam_lr: is 0.1"),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1}}},
        *("--learning-rate", "0.2", "warmup_max_lr: is 0.1"),
    ),
    ({"optimizer": {"type": "Rprop"}}, "--weight-decay", "0.2", "Rprop has no weight decay"),
    ({"optimizer": {"type": "AdamW", "params": {"weight_decay": 0}}}, "--weight-decay", "0.2", "is 0, but"),
    (
        {"scheduler": {"type": "StepLR", "params": {"step_size": 3}}},
        *("--warmup-steps", "2", "StepLR has no warmup_num_steps"),
    ),
    ({"train_batch_size": 8}, "--batch-size", "4", "train_batch_size: is 8, but --batch-size is 4"),
    ({"elasticity": {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [2]}}, "--batch-size", "4",
     "elasticity chooses"),
]  # fmt: skip


def test_a_flag_that_contradicts_the_json_is_refused_before_ranks_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    for tree, flag, value, says in CONTRADICTIONS:
        with subtests.test(says):
            (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": "auto", **tree}))
            argv = ["--config", str(tmp_path / "ds.json"), "pretrain", flag, value]
            assert main(argv) == 2
            assert says in capsys.readouterr().err


def test_numbers_that_no_run_can_have_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(ROOT / "ds_configs" / "hf_zero3.json")
    for flag, value in (
        *(("--learning-rate", each) for each in ("nan", "-1", "inf", "x")),
        *(("--batch-size", each) for each in ("0", "-2", "1.5", "9" * 5000)),
        *(("--max-steps", each) for each in ("-1", "0", "x")),
        *(("--epochs", each) for each in ("nan", "-1", "0")),
        *(("--seq-length", each) for each in ("0", "1")),
        *(("--save-every", "-1"), ("--eval-every", "x"), ("--train-tokenizer", "0"), ("--seed", "-1")),
        ("--seed", str(2**64)),
    ):
        assert main(["--config", config, "--dry_run", "pretrain", flag, value]) == 2, (flag, value)
        said = capsys.readouterr().err
        assert flag in said and "Traceback" not in said and len(said) < 400, said
