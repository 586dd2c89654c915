"""Packed rows are exactly the token stream, are built once, and are never incomplete."""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from launcher.data.pack import pack
from launcher.data.tokenizer import byte_tokenizer
from launcher.errors import ConfigError
from tests.pool import RankContext, WorkerPool

pack_module = importlib.import_module("launcher.data.pack")  # the package exports the function by that name

EOS = 258
TEXTS = ["first document", "", "the second, with an Ümlaut\n", "3"] * 5


def rows_of(texts: list[str]) -> Dataset:
    return Dataset.from_dict({"text": texts})


def stream(texts: list[str]) -> list[int]:
    return [token for text in texts if text for token in [*text.encode(), EOS]]


@pytest.mark.parametrize("seq_length", [1, 7, 32])
def test_rows_are_the_stream_of_documents(tmp_path: Path, seq_length: int) -> None:
    packed = pack(rows_of(TEXTS), byte_tokenizer(), seq_length, tmp_path)
    expected = stream(TEXTS)
    assert len(packed) == len(expected) // seq_length
    assert packed.n_tokens == len(expected)
    assert packed[0].dtype == torch.int64 and packed[0].shape == (seq_length,)
    assert torch.cat([packed[i] for i in range(len(packed))]).tolist() == expected[: len(packed) * seq_length]
    assert packed[-1].equal(packed[len(packed) - 1])
    with pytest.raises(IndexError):
        packed[len(packed)]


def test_long_documents_are_tokenised_in_pieces_without_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["".join(f"line {i}\n" for i in range(100)), "x" * 1000, "end"]
    whole = pack(rows_of(texts), byte_tokenizer(), 10, tmp_path / "whole")
    monkeypatch.setattr(pack_module, "PIECE_CHARS", 64)
    pieces = pack(rows_of(texts), byte_tokenizer(), 10, tmp_path / "pieces")
    assert (whole.path / "tokens.bin").read_bytes() == (pieces.path / "tokens.bin").read_bytes()
    assert whole.n_tokens == len(stream(texts))


def test_the_cache_is_used_and_keyed_by_text_tokenizer_and_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Path] = []
    write = pack_module._write
    monkeypatch.setattr(pack_module, "_write", lambda path, *args: (built.append(path), write(path, *args)))
    tokenizer = byte_tokenizer()
    first = pack(rows_of(TEXTS), tokenizer, 8, tmp_path)
    tokenizer(["a", "bcd"], padding=True, truncation=True, max_length=2)  # leaves its marks on the tokenizer
    assert pack(rows_of(TEXTS), tokenizer, 8, tmp_path).path == first.path
    assert len(built) == 1
    pack(rows_of(TEXTS), tokenizer, 9, tmp_path)
    pack(rows_of([*TEXTS, "more"]), tokenizer, 8, tmp_path)
    other = byte_tokenizer()
    other.add_tokens(["document"])
    changed = pack(rows_of(TEXTS), other, 8, tmp_path)
    assert len(built) == 4
    assert 260 in changed[0].tolist() + changed[1].tolist()


def test_ids_beyond_16_bits_survive(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([f"<t{i}>" for i in range(70_000)])
    packed = pack(rows_of(["<t69999>a"]), tokenizer, 3, tmp_path)
    assert packed[0].tolist() == [260 + 69_999, 97, EOS]


def test_pickles_without_the_tokens(tmp_path: Path) -> None:
    packed = pack(rows_of(["word " * 10_000]), byte_tokenizer(), 100, tmp_path)
    data = pickle.dumps(packed)
    assert len(data) < 2000
    assert pickle.loads(data)[3].equal(packed[3])


def test_too_little_text_and_no_eos(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="5 tokens, too few for one sequence of 6"):
        pack(rows_of(["four"]), byte_tokenizer(), 6, tmp_path)
    assert len(pack(rows_of(["four"]), byte_tokenizer(), 5, tmp_path)) == 1
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="no eos_token"):
        pack(rows_of(["four"]), tokenizer, 5, tmp_path)


def test_the_cache_directory_comes_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAUNCHER_CACHE", str(tmp_path / "here"))
    assert (tmp_path / "here") in pack(rows_of(TEXTS), byte_tokenizer(), 8).path.parents


def pack_on_rank(ctx: RankContext, cache: Path) -> tuple[list[list[int]], int]:
    """Return the rows on this rank, and how many times it built them."""
    built: list[int] = []
    write = pack_module._write

    def counted(*args: object) -> None:
        built.append(1)
        write(*args)  # type: ignore[arg-type]

    pack_module._write = counted
    try:
        packed = pack(rows_of(TEXTS), byte_tokenizer(), 16, cache)
        return [packed[i].tolist() for i in range(len(packed))], len(built)
    finally:
        pack_module._write = write


def test_ranks_that_pack_together_see_the_same_rows_and_one_builds(pool: WorkerPool, tmp_path: Path) -> None:
    results = pool.run(pack_on_rank, 2, tmp_path)
    assert results[0][0] == results[1][0] != []
    assert [token for row in results[0][0] for token in row] == stream(TEXTS)[: 16 * len(results[0][0])]
    assert sum(built for _, built in results) == 1


KILLED = textwrap.dedent(
    """
    import sys, time
    from tests.data.test_pack import TEXTS, byte_tokenizer, pack_module, rows_of

    def endless(*args):
        yield [7] * 1000
        yield [7] * 100_000
        print("half", flush=True)
        time.sleep(60)

    pack_module._token_chunks = endless
    pack_module.pack(rows_of(TEXTS), byte_tokenizer(), 16, sys.argv[1])
    """
)


def test_a_kill_while_packing_leaves_no_torn_rows(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    victim = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert victim.stdout is not None and victim.stdout.readline() == "half\n"
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    victim.stdout.close()
    assert list(tmp_path.rglob("tokens.bin")) != []  # it was killed in the middle of writing

    packed = pack(rows_of(TEXTS), byte_tokenizer(), 16, tmp_path)
    assert torch.cat(list(packed)).tolist() == stream(TEXTS)[: 16 * len(packed)]
    assert len(list(tmp_path.rglob("tokens.bin"))) == 1
