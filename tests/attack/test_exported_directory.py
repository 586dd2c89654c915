"""An exported directory differs from its source only in the weights."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from launcher.cli.recipe_flags import training_parser
from launcher.data.tokenizer import byte_tokenizer, load_tokenizer
from launcher.engine.weights import model_with_source
from launcher.models.build import load_config
from launcher.run import Run
from launcher.train import Training
from tests.data.test_sft import TEMPLATE
from tests.pipeline.running import config_of, engine_of
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE
from tests.pool.reference import batch, tiny_gpt2, tiny_llama

KINDS = {"llama": tiny_llama, "gpt2": tiny_gpt2}
STOP = [2, 7]  # ends of a turn that only generation_config.json knows


def source(directory: Path, kind: str, dtype: str) -> Path:
    """Return a chat model as on the Hub, including additional keys in its files."""
    path = directory / "source"
    model = KINDS[kind](vocab=264, use_cache=True)
    model.generation_config = GenerationConfig(eos_token_id=STOP, do_sample=True, temperature=0.7)
    model.save_pretrained(path)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    document = json.loads((path / "config.json").read_text())
    document |= {"torch_dtype": dtype, "transformers_version": "4.38.1"}
    del document["dtype"]
    (path / "config.json").write_text(json.dumps(document, indent=4))
    (path / "merges.txt").write_text("#version: 0.2\n")
    return path


def finetuned(ctx: RankContext, directory: str, stages: int, edit: str = "") -> None:
    """Run one step of `finetune` on a directory."""
    path = f"{directory}/source"
    config = load_config(path)
    tokenizer = load_tokenizer(None, path, config.vocab_size)
    made = model_with_source(config, path, from_scratch=False, seed=0)
    if edit == "context":
        made.model.config.max_position_embeddings = 128
    if edit == "template":
        tokenizer.chat_template = "{{ messages }}"
    engine = engine_of(config_of(1, 1, {"stages": stages}), made.model, source=made.source)
    args = training_parser("pretrain", "").parse_args(["--seed", "0"])
    run = Run(args, engine.resolved, Path(directory), DEVICE, Console(file=open(os.devnull, "w")), ctx.rank)  # noqa: SIM115
    run.describe(engine, "tiny", "rows")
    Training(run, engine, batch(0, 8), None, 1, "tiny", tokenizer).fit()
    engine.destroy()


def files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.suffix != ".safetensors"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stages", [1, 2])
def test_it_differs_in_the_weights_only(pool: WorkerPool, tmp_path: Path, kind: str, stages: int) -> None:
    path = source(tmp_path, kind, "float32")
    pool.run(finetuned, stages, str(tmp_path), stages)
    assert files(tmp_path / "model") == files(path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.use_cache is True and model.generation_config.eos_token_id == STOP
    weights = [path / "model.safetensors", tmp_path / "model" / "model.safetensors"]
    assert weights[0].read_bytes() != weights[1].read_bytes()


def test_only_the_dtype_follows_the_weights(pool: WorkerPool, tmp_path: Path) -> None:
    path = source(tmp_path, "llama", "bfloat16")
    pool.run(finetuned, 1, str(tmp_path), 1)
    found, want = (json.loads((p / "config.json").read_text()) for p in (tmp_path / "model", path))
    assert found == {**want, "torch_dtype": "float32"} and list(found) == list(want)


def test_what_a_program_changed_goes_out_changed(pool: WorkerPool, tmp_path: Path) -> None:
    source(tmp_path, "llama", "float32")
    pool.run(finetuned, 1, str(tmp_path), 1, "context")
    document = json.loads((tmp_path / "model" / "config.json").read_text())
    assert document["max_position_embeddings"] == 128 and document["use_cache"] is True
    pool.run(finetuned, 1, str(tmp_path), 1, "template")
    again: Any = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert again.chat_template == "{{ messages }}"


def exported(ctx: RankContext, directory: str, kind: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(f"{directory}/source")
    engine = engine_of(config_of(3, 1, {"stages": 1}), model)
    engine.save_16bit_model(f"{directory}/model")
    engine.destroy()


def test_a_script_of_its_own_exports_how_to_generate(pool: WorkerPool, tmp_path: Path) -> None:
    path = source(tmp_path, "llama", "float32")
    pool.run(exported, 1, str(tmp_path), "llama")
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "model" / name).read_bytes() == (path / name).read_bytes()
