"""Byte-level and trained tokenizers: exact round trip, fixed ids, and files that load again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from launcher.data.tokenizer import byte_tokenizer, load_tokenizer, train_tokenizer
from launcher.errors import ConfigError

BYTES = byte_tokenizer()
TRICKY = "héllo 日本 👍 don't , . \r\n\t \x00\x7f  <eos> ünd\u2028"


@pytest.fixture
def text() -> Dataset:
    words = [f"{a}{b}{c}" for a in "bdfgklmn" for b in "aeiou" for c in "rstx"]
    return Dataset.from_dict({"text": [" ".join(words[i:] + words[:i]) for i in range(20)]})


@given(st.text())
def test_bytes_decode_to_the_very_text(text: str) -> None:
    assert BYTES.decode(BYTES(text)["input_ids"]) == text


@given(st.text(alphabet=st.characters(exclude_characters="<", codec="utf-8")))
def test_ids_are_the_bytes_of_utf8(text: str) -> None:
    assert BYTES(text)["input_ids"] == list(text.encode())


def test_special_tokens_have_the_ids_after_the_bytes() -> None:
    tokenizer = load_tokenizer(None, None, 512)
    ids = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id)
    assert ids == (256, 257, 258, 259)
    assert len(tokenizer) == 260


def test_a_vocabulary_below_260_is_refused() -> None:
    assert len(load_tokenizer(None, None, 260)) == 260
    with pytest.raises(ConfigError, match="vocab_size 259"):
        load_tokenizer(None, None, 259)


def test_a_bare_config_and_a_directory_without_tokenizer_get_bytes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 300}))
    for place in (tmp_path, tmp_path / "config.json"):
        assert load_tokenizer(None, str(place), 300)("a")["input_ids"] == [97]


def test_saved_and_loaded_by_name_or_with_the_model(tmp_path: Path) -> None:
    BYTES.save_pretrained(tmp_path)
    for loaded in (
        load_tokenizer(str(tmp_path), None, 260),
        load_tokenizer(None, str(tmp_path), 260),
        AutoTokenizer.from_pretrained(tmp_path),
        PreTrainedTokenizerFast.from_pretrained(tmp_path),
    ):
        ids = loaded(TRICKY)["input_ids"]
        assert ids == BYTES(TRICKY)["input_ids"] and loaded.decode(ids) == TRICKY
        assert (loaded.pad_token_id, loaded.eos_token_id) == (256, 258)


def test_more_tokens_than_the_embedding_has_rows(tmp_path: Path) -> None:
    BYTES.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"260 tokens.*vocab_size is 200"):
        load_tokenizer(str(tmp_path), None, 200)


def test_an_unknown_name_is_named() -> None:
    with pytest.raises(ConfigError, match="'nobody/nothing'") as error:
        load_tokenizer("nobody/nothing", None, 260)
    assert error.value.where == "--tokenizer"


def test_a_trained_tokenizer_has_the_asked_size_and_exact_round_trip(text: Dataset, tmp_path: Path) -> None:
    tokenizer = train_tokenizer(text, 320, tmp_path)
    assert len(tokenizer) == 320
    assert sorted(tokenizer.get_vocab().values()) == list(range(320))
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (256, 258)
    assert tokenizer.decode(tokenizer(TRICKY)["input_ids"]) == TRICKY
    assert tokenizer("日")["input_ids"] == list("日".encode())
    sample = text[0]["text"]
    assert len(tokenizer(sample)["input_ids"]) < 0.7 * len(sample)


def test_training_again_gives_the_same_tokens(text: Dataset, tmp_path: Path) -> None:
    first, second = train_tokenizer(text, 300, tmp_path / "a"), train_tokenizer(text, 300, tmp_path / "b")
    assert first.get_vocab() == second.get_vocab()
    assert first.backend_tokenizer.to_str() == second.backend_tokenizer.to_str()


def test_a_trained_tokenizer_is_taken_from_the_cache(
    text: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = train_tokenizer(text, 300, tmp_path)
    monkeypatch.setattr("launcher.data.tokenizer._train", None)
    assert train_tokenizer(text, 300, tmp_path).get_vocab() == first.get_vocab()


def test_too_many_or_too_few_tokens_to_train(text: Dataset, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="259 tokens are too few"):
        train_tokenizer(text, 259, tmp_path)
    with pytest.raises(ConfigError, match="90000 were requested"):
        train_tokenizer(text, 90_000, tmp_path)
