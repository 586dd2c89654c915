"""Token ids are stored unchanged, and ids beyond the embedding never reach the model."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from launcher.data.pack import pack
from launcher.data.sft import load_sft
from launcher.data.tokenizer import load_tokenizer
from launcher.errors import ConfigError
from launcher.run import Run
from launcher.train import Training
from tests.pipeline.running import config_of, engine_of
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE
from tests.pool.reference import tiny_llama

LARGEST = 70_000  # of five tokens


def with_gaps(largest: int = LARGEST) -> PreTrainedTokenizerFast:
    """Return a word tokenizer with gaps between its ids."""
    vocabulary = {"<eos>": 0, "<unk>": 1, "a": 2, "b": 3, "far": largest}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")


@pytest.mark.parametrize("largest", [65_534, 65_535, 65_536, LARGEST])
def test_ids_are_stored_as_they_are(tmp_path: Path, largest: int) -> None:
    packed = pack(Dataset.from_dict({"text": ["a far b"]}), with_gaps(largest), 4, tmp_path)
    assert packed[0].tolist() == [2, largest, 3, 0]
    assert packed.largest_id == largest
    stored = json.loads((packed.path / "meta.json").read_text())["dtype"]
    assert np.dtype(stored).itemsize == (2 if largest < 1 << 16 else 4)


def test_an_id_that_the_tokenizer_does_not_name_is_refused(tmp_path: Path) -> None:
    tokenizer = with_gaps(4)
    encode = type(tokenizer).__call__

    class Odd(PreTrainedTokenizerFast):
        def __call__(self, *args: Any, **more: Any) -> Any:
            found = encode(self, *args, **more)
            found["input_ids"] = [[LARGEST, *ids] for ids in found["input_ids"]]
            return found

    tokenizer.__class__ = Odd
    with pytest.raises(
        ConfigError, match=f"produces ids from 0 to {LARGEST}, but its vocabulary ends with 4"
    ):
        pack(Dataset.from_dict({"text": ["a far b"]}), tokenizer, 4, tmp_path)


def test_a_tokenizer_is_judged_by_its_largest_id(tmp_path: Path) -> None:
    with_gaps().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"the largest id is {LARGEST}, but the model's vocab_size is 100"):
        load_tokenizer(str(tmp_path), None, 100)
    assert len(load_tokenizer(str(tmp_path), None, LARGEST + 1)) == 5


def told(ctx: RankContext, directory: str, kind: str) -> str:
    """Return the messages before training on data with too large ids, or the failure."""
    if kind == "packed":
        text = Dataset.from_dict({"text": ["a far b a b"] * 20})
        data: Any = pack(text, with_gaps(), 4, directory)
    else:
        data = load_sft(f"{directory}/rows.jsonl", with_gaps(), 6, split="all")
    args = Namespace(
        seed=0, resume=None, profile=None, profile_steps=(1, 1), eval_every=None, save_every=None
    )
    engine = engine_of(config_of(1, 1, {"stages": 1}), tiny_llama())
    console = Console(file=open(os.devnull, "w"), quiet=True)  # noqa: SIM115
    run = Run(args, engine.resolved, Path(directory), DEVICE, console, ctx.rank)
    try:
        training = Training(run, engine, data, None, 1, "tiny")
        training._step(next(training.loader.steps()))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_ids_that_the_model_has_no_embedding_for_are_refused_before_training(
    pool: WorkerPool, tmp_path: Path, kind: str
) -> None:
    rows = [{"prompt": "a ", "completion": "far b"}] * 20
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    [said] = pool.run(told, 1, str(tmp_path), kind)
    assert said.startswith("ConfigError") and f"token id {LARGEST}" in said and "vocabulary of 64" in said
    assert ("tokens.bin" if kind == "packed" else "rows.jsonl") in said and "--tokenizer" in said


@pytest.mark.parametrize("file", ["tokens.bin", "meta.json", None])
def test_damaged_tokens_are_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str | None
) -> None:
    rows = Dataset.from_dict({"text": ["a far b a b"] * 5})
    first = pack(rows, with_gaps(), 4, tmp_path)
    want, largest = [first[i].tolist() for i in range(len(first))], first.largest_id  # type: ignore[union-attr]
    if file is None:
        (first.path / "meta.json").unlink()
    else:
        content = bytearray((first.path / file).read_bytes())
        content[len(content) // 2] ^= 1
        (first.path / file).write_bytes(content)
    again = pack(rows, with_gaps(), 4, tmp_path)
    assert [again[i].tolist() for i in range(len(again))] == want and again.largest_id == largest  # type: ignore[union-attr]
    assert "rebuilding it" in caplog.text and str(first.path) in caplog.text
