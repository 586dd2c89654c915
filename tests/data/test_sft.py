"""Instruction data: which tokens the loss covers, masking, padded and packed rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from launcher.data.loader import GlobalBatchLoader
from launcher.data.sft import IGNORED, load_sft, prompt_tokens
from launcher.data.tokenizer import byte_tokenizer, save_tokenizer
from launcher.errors import ConfigError

EOS, PAD = 258, 256
CHAT = [
    {"role": "user", "content": "Hi?"},
    {"role": "assistant", "content": "Höi!"},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "Bye"},
]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
REWRITING = "{% for m in messages %}{% if loop.last %}[last]{% endif %}{{ m.content }};{% endfor %}"


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    file = path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def learned(item: dict[str, torch.Tensor]) -> list[int]:
    kept = item["labels"] != IGNORED
    assert item["labels"][kept].equal(item["input_ids"][kept])
    return item["input_ids"][kept].tolist()


def tokens(text: str) -> list[int]:
    return [
        EOS if part is None else part for piece in text.split("<eos>") for part in [*piece.encode(), None]
    ][:-1]


def test_prompt_is_masked_and_completion_learned(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(
        tmp_path, [{"prompt": "2 + 2 = ", "completion": "4"}, {"prompt": "ä: ", "completion": "long one"}]
    )
    data = load_sft(path, tokenizer, 16, split="all")
    assert len(data) == 2
    item = data[0]
    assert item["input_ids"].tolist() == tokens("2 + 2 = 4<eos>") + [PAD] * 6
    assert learned(item) == tokens("4<eos>")
    assert item["attention_mask"].tolist() == [1] * 10 + [0] * 6
    assert all(tensor.dtype == torch.int64 and tensor.shape == (16,) for tensor in item.values())
    assert learned(data[1]) == tokens("long one<eos>")


def test_text_is_learned_whole(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    data = load_sft(write(tmp_path, [{"text": "all of it"}]), tokenizer, 16, split="all")
    assert learned(data[0]) == tokens("all of it<eos>")


def test_messages_without_a_template(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    data = load_sft(write(tmp_path, [{"messages": CHAT}]), tokenizer, 128, split="all")
    length = int(data[0]["attention_mask"].sum())
    text = "user:\nHi?\n\nassistant:\nHöi!<eos>\n\nuser:\nAnd?\n\nassistant:\nBye<eos>"
    assert data[0]["input_ids"][:length].tolist() == tokens(text)
    assert learned(data[0]) == tokens("Höi!<eos>Bye<eos>")
    # and a prompt is written so, by whoever loads the model
    save_tokenizer(tokenizer, tmp_path)
    saved = AutoTokenizer.from_pretrained(tmp_path)
    prompt = saved.apply_chat_template(CHAT[:3], tokenize=False, add_generation_prompt=True)
    assert prompt == text.removesuffix("Bye<eos>").replace("<eos>", tokenizer.eos_token)
    assert prompt_tokens("Hi?", saved) == tokens("user:\nHi?\n\nassistant:\n")


def test_rows_without_messages_need_no_template(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    load_sft(write(tmp_path, [{"text": "all of it"}]), tokenizer, 16, split="all")
    assert tokenizer.chat_template is None


def test_messages_with_a_template(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = TEMPLATE
    data = load_sft(write(tmp_path, [{"messages": CHAT}]), tokenizer, 128, split="all")
    length = int(data[0]["attention_mask"].sum())
    text = "<|user|>Hi?<|assistant|>Höi!<eos><|user|>And?<|assistant|>Bye<eos>"
    assert data[0]["input_ids"][:length].tolist() == tokens(text)
    assert learned(data[0]) == tokens("Höi!<eos>Bye<eos>")


def test_a_template_that_rewrites_the_past_is_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.chat_template = REWRITING
    with pytest.raises(ConfigError, match="changes earlier messages"):
        load_sft(write(tmp_path, [{"messages": CHAT}]), tokenizer, 128, split="all")


def test_packed_rows_are_full_and_hide_the_first_token_of_each_conversation(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write(tmp_path, [{"text": "abc"}, {"prompt": "de", "completion": "fg"}, {"text": "hi"}])
    data = load_sft(path, tokenizer, 5, split="all", packed=True)
    ids = torch.cat([item["input_ids"] for item in data])
    labels = torch.cat([item["labels"] for item in data])
    assert [item["position_ids"].tolist() for item in data] == [[0, 1, 2, 3, 0], [0, 1, 2, 3, 0]]
    assert ids.tolist() == tokens("abc<eos>defg<eos>h")
    assert labels.tolist() == [IGNORED, *tokens("bc<eos>"), IGNORED, IGNORED, *tokens("fg<eos>"), IGNORED]


def test_the_last_packed_row_of_the_eval_split_is_filled(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """A small eval split may fill no sequence. The filling is a document of its own, without labels."""
    path = write(tmp_path, [{"text": "abc"}, {"text": "hi"}])
    (item,) = load_sft(path, tokenizer, 6, split="eval", packed=True)
    assert item["position_ids"].tolist() == [0, 1, 2, 0, 1, 2] and item["input_ids"].tolist()[:2] == tokens(
        "hi"
    )
    assert learned(item) == tokens("i<eos>")
    with pytest.raises(ConfigError, match=r"The split 'train'[^!]*does not fill one sequence of 6 tokens"):
        load_sft(path, tokenizer, 6, packed=True)


def test_long_rows_are_cut_and_rows_with_nothing_to_learn_left_out(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "p" * 20, "completion": "c"}, {"prompt": "p", "completion": "c" * 20}]
    data = load_sft(write(tmp_path, rows), tokenizer, 10, split="all")
    assert (len(data), data.n_truncated, data.n_dropped) == (1, 2, 1)
    assert learned(data[0]) == tokens("c" * 9)
    assert "2 were truncated to 10 tokens and 1 were dropped" in caplog.text
    with pytest.raises(ConfigError, match="No target tokens in 1 rows"):
        load_sft(write(tmp_path, rows[:1]), tokenizer, 10, split="all")


def test_the_last_rows_are_held_out(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(tmp_path, [{"text": f"row {i}"} for i in range(250)])
    train, held_out = load_sft(path, tokenizer, 16), load_sft(path, tokenizer, 16, split="eval")
    assert (len(train), len(held_out)) == (248, 2)
    assert learned(held_out[0]) == tokens("row 248<eos>")


@pytest.mark.parametrize("row", [{"question": "?", "answer": "!"}, {"messages": [], "text": ""}])
def test_other_rows_are_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, row: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as error:
        load_sft(write(tmp_path, [row]), tokenizer, 16, split="all")
    assert next(iter(row)) in error.value.what and "row 0" in str(error.value.where)
    assert "prompt" in str(error.value.fix)


def test_the_loader_deals_conversations(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(tmp_path, [{"prompt": "p", "completion": "c" * (i + 1)} for i in range(8)])
    data = load_sft(path, tokenizer, 16, split="all")
    batch = next(iter(GlobalBatchLoader(data, global_batch=4, micro_batch=2, dp_rank=1, dp_degree=2, seed=0)))
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == {
        "input_ids": (2, 16), "labels": (2, 16), "attention_mask": (2, 16)
    }  # fmt: skip
