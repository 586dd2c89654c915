"""What `--dataset` accepts, and the evaluation split."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from datasets import Dataset

from launcher.data.text import hold_out, load_rows, load_text
from launcher.errors import ConfigError


def documents(dataset: str, split: str = "all") -> list[str]:
    return load_text(dataset, split=split)["text"][:]


def write_jsonl(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_stdlib_is_topics_then_sources_without_tests() -> None:
    rows = load_text("stdlib", split="all")
    texts = rows["text"][:]
    assert 'The "assert" statement' in texts[0]  # the first topic by name
    assert any("class JSONDecoder" in text for text in texts)
    assert not any("class TestCase" in text and "support.run_unittest" in text for text in texts)
    assert sum(map(len, texts)) > 5_000_000
    assert load_text("stdlib", split="all")._fingerprint == rows._fingerprint

    train, held_out = hold_out(rows, "train", where="stdlib"), hold_out(rows, "eval", where="stdlib")
    assert "".join([*train["text"], *held_out["text"]]) == "".join(texts)
    share = sum(map(len, held_out["text"])) / sum(map(len, texts))
    assert 0.009 < share < 0.021


def test_local_files_of_every_kind(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("line 1\n\nline 2\n")
    assert documents(str(tmp_path / "a.txt")) == ["line 1\n\nline 2\n"]

    rows = [{"id": 1, "text": "eins"}, {"id": 2, "text": "zwei"}]
    assert documents(str(write_jsonl(tmp_path / "b.jsonl", rows))) == ["eins", "zwei"]

    (tmp_path / "c.json").write_text(json.dumps(rows))
    assert documents(str(tmp_path / "c.json")) == ["eins", "zwei"]

    Dataset.from_dict({"content": ["drei", "vier"], "id": [3, 4]}).to_parquet(tmp_path / "d.parquet")
    assert documents(str(tmp_path / "d.parquet")) == ["drei", "vier"]

    (tmp_path / "notes.md").write_text("left out")
    mixed = documents(str(tmp_path))
    assert sorted(mixed) == sorted(["line 1\n\nline 2\n", "eins", "zwei", "eins", "zwei", "drei", "vier"])


def test_a_directory_is_read_in_the_order_of_its_paths(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("sub/c.txt", "b.txt", "a.txt"):
        (tmp_path / name).write_text(name)
    assert documents(str(tmp_path)) == ["a.txt", "b.txt", "sub/c.txt"]


def test_the_same_file_has_the_same_fingerprint(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "word " * 50} for _ in range(400)])
    for split in ("train", "eval"):
        assert (
            load_text(str(path), split=split)._fingerprint == load_text(str(path), split=split)._fingerprint
        )
    before = load_text(str(path))._fingerprint
    write_jsonl(path, [{"text": "other " * 50} for _ in range(400)])
    assert load_text(str(path))._fingerprint != before


@pytest.mark.parametrize("name", ["missing.jsonl", "./missing", "/no/such/place"])
def test_a_missing_path_is_named(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_text(name)
    assert repr(name) in error.value.what and ".parquet" in str(error.value.fix)


def test_an_unknown_hub_id_is_named() -> None:
    with pytest.raises(ConfigError, match="'nobody/nothing' from the Hugging Face Hub"):
        load_text("nobody/nothing")


def test_a_file_of_another_kind_and_an_empty_directory(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("text")
    for path in (tmp_path / "a.md", tmp_path):
        with pytest.raises(ConfigError) as error:
            load_text(str(path))
        assert str(path) in error.value.what


def test_a_torn_jsonl_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "tw')
    with pytest.raises(ConfigError) as error:
        load_text(str(tmp_path / "a.jsonl"))
    assert "a.jsonl" in error.value.what


def test_rows_without_one_text_column_name_their_columns(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "?", "answer": "!"}])
    with pytest.raises(ConfigError, match="'question', 'answer'"):
        load_text(str(path))
    assert load_rows(str(path)).column_names == ["question", "answer"]


def test_a_file_without_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ConfigError, match="no text"):
        load_text(str(tmp_path / "a.txt"))


def test_whole_documents_are_held_out_where_they_are_small() -> None:
    texts = [f"document {i:04d}\n" * 20 for i in range(1000)]
    rows = Dataset.from_dict({"text": texts})
    train = hold_out(rows, "train", where="x", min_eval_chars=1)["text"][:]
    held_out = hold_out(rows, "eval", where="x", min_eval_chars=1)["text"][:]
    assert train + held_out == texts
    assert len(held_out) == 10


def test_one_document_is_cut_at_a_line() -> None:
    text = "".join(f"line {i}\n" for i in range(5000))
    rows = Dataset.from_dict({"text": [text]})
    (train,) = hold_out(rows, "train", where="x", min_eval_chars=1)["text"]
    (held_out,) = hold_out(rows, "eval", where="x", min_eval_chars=1)["text"]
    assert train + held_out == text
    assert train.endswith("\n")
    assert 0.009 < len(held_out) / len(text) <= 0.0101


def test_the_eval_part_is_long_enough_for_a_sequence_but_never_more_than_half() -> None:
    rows = Dataset.from_dict({"text": ["é" * 1000 + "\n"] * 30})
    held_out = hold_out(rows, "eval", where="x", min_eval_chars=4000)["text"][:]
    assert sum(map(len, held_out)) >= 2000  # of two bytes each
    tiny = Dataset.from_dict({"text": ["aa\n", "bb\n"]})
    assert hold_out(tiny, "train", where="x")["text"][:] == ["aa\n"]
    assert hold_out(tiny, "eval", where="x")["text"][:] == ["bb\n"]


def test_rows_that_were_chosen_before_are_measured_themselves() -> None:
    rows = Dataset.from_dict({"text": ["x" * 10_000, "a" * 10, "b" * 10, "c" * 10]}).select([3, 1, 2])
    assert hold_out(rows, "eval", where="x", min_eval_chars=1)["text"][:][-1].endswith("b")
    joined = "".join(hold_out(rows, "train", where="x")["text"]) + "".join(
        hold_out(rows, "eval", where="x")["text"]
    )
    assert joined == "c" * 10 + "a" * 10 + "b" * 10


def test_an_unknown_split_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text\n")
    with pytest.raises(ConfigError, match="'test'"):
        load_text(str(tmp_path / "a.txt"), split="test")
