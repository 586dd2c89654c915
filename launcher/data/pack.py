"""Packs documents into rows of exactly `seq_length` tokens in a memory-mapped file, built once."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from launcher.data.cache import build_once, cache_key, checksums, default_cache_dir
from launcher.data.documents import IGNORED, positions, starts_after
from launcher.data.text import valid_text
from launcher.data.tokenizer import fingerprint
from launcher.data.vocabulary import dtype_of, largest_id
from launcher.errors import ConfigError

logger = logging.getLogger(__name__)

FORMAT = "packed-2"
PIECE_CHARS = 1 << 17
"""Approximate number of characters to tokenize at a time: this needs some hundred bytes per token."""


class PackedDataset(torch.utils.data.Dataset[torch.Tensor | dict[str, torch.Tensor]]):
    """Rows of tokens in a memory map: `ds[i]` is a LongTensor [seq_length]. Cheap to pickle.

    Args:
        path: a directory that `pack` created.
        separator: the token that ends documents, if they are masked from each other: `ds[i]` is then
            {"input_ids", "labels", "position_ids"}. Positions restart at each document, and no loss is
            computed on its first token.
    """

    def __init__(self, path: str | Path, separator: int | None = None) -> None:
        self.path = Path(path)
        self.separator = separator
        meta = json.loads((self.path / "meta.json").read_text())
        self.seq_length: int = meta["seq_length"]
        self.n_tokens: int = meta["tokens"]
        """Number of tokens in the whole text, including the dropped remainder."""
        self.largest_id: int = meta["largest_id"]
        self.origin = str(self.path / "tokens.bin")
        self.digest = checksums(self.path)["tokens.bin"]
        """Checksum of the tokens of the whole text, independent of the length of a row."""
        self._dtype = np.dtype(meta["dtype"])
        self._length = self.n_tokens // self.seq_length
        self._rows = self._open()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> torch.Tensor | dict[str, torch.Tensor]:
        ids = self._rows[index].astype(np.int64)
        if self.separator is None:
            return torch.from_numpy(ids)
        starts = starts_after(ids, self.separator)
        row = {
            "input_ids": ids,
            "labels": np.where(starts, IGNORED, ids),
            "position_ids": positions(starts),
        }
        return {name: torch.from_numpy(values) for name, values in row.items()}

    def _open(self) -> np.ndarray:
        shape = (self._length, self.seq_length)
        return np.memmap(self.path / "tokens.bin", dtype=self._dtype, mode="r", shape=shape)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rows": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._rows = self._open()


def pack(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    seq_length: int,
    cache_dir: str | Path | None = None,
    *,
    document_mask: bool = False,
) -> PackedDataset:
    """Tokenize column `text`, end every document with <eos>, and cut the stream into rows of `seq_length`.

    An incomplete last row is dropped. The result is stored in `cache_dir` (default `$LAUNCHER_CACHE` or
    `~/.cache/launcher`) under a key of the text, the tokenizer and the length; it is rebuilt if its files are
    damaged. All ranks may call at once.

    Args:
        document_mask: mask the documents in a row from each other: see `PackedDataset`.

    Raises:
        ConfigError: the text is shorter than one row, or the tokenizer has no end-of-sequence token.
    """
    if seq_length < 1:
        raise ConfigError(
            f"Invalid sequence length {seq_length}: it must be at least 1.", where="--seq-length"
        )
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"The tokenizer {tokenizer.name_or_path!r} has no eos_token to separate documents.",
            where="--tokenizer",
            fix="Set eos_token in its tokenizer_config.json.",
        )
    key = cache_key(FORMAT, dataset._fingerprint, fingerprint(tokenizer), seq_length)
    final = Path(cache_dir or default_cache_dir()) / "packed" / key
    made = build_once(final, lambda path: _write(path, dataset, tokenizer, seq_length))
    return PackedDataset(made, tokenizer.eos_token_id if document_mask else None)


def _write(directory: Path, dataset: Dataset, tokenizer: PreTrainedTokenizerBase, seq_length: int) -> None:
    logger.info("packing %d documents into rows of %d tokens", len(dataset), seq_length)
    dtype = dtype_of(largest_id(tokenizer))
    n_tokens, largest = 0, 0
    with open(directory / "tokens.bin", "wb") as file:
        for ids in _token_chunks(dataset, tokenizer):
            array = np.asarray(ids, dtype=np.int64)
            largest = max(largest, int(array.max()))
            if array.min() < 0 or largest > np.iinfo(dtype).max:
                raise ConfigError(
                    f"The tokenizer {tokenizer.name_or_path!r} produces ids from {array.min()} to {largest}, but its "
                    f"vocabulary ends with {largest_id(tokenizer)}.",
                    where="--tokenizer",
                    fix="Repair its tokenizer.json, or use another tokenizer.",
                )
            file.write(array.astype(dtype).tobytes())
            n_tokens += len(array)
    if n_tokens < seq_length:
        raise ConfigError(
            f"The text has {n_tokens} tokens, too few for one sequence of {seq_length}.",
            where="--seq-length",
            fix=f"Use more text, or a --seq-length of at most {n_tokens}.",
        )
    meta = {
        "format": FORMAT,
        "seq_length": seq_length,
        "tokens": n_tokens,
        "largest_id": largest,
        "dtype": dtype.str,
    }
    (directory / "meta.json").write_text(json.dumps(meta))


def _token_chunks(dataset: Dataset, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """Yield the ids of the whole stream, for about PIECE_CHARS characters of text at a time."""
    pieces: list[str] = []
    ends: list[bool] = []
    waiting = 0
    for text in _texts(dataset):
        cut = _cut(text)
        for i, piece in enumerate(cut):
            pieces.append(piece)
            ends.append(i == len(cut) - 1)
            waiting += len(piece)
            if waiting >= PIECE_CHARS:
                yield _encode(pieces, ends, tokenizer)
                pieces, ends, waiting = [], [], 0
    if pieces:
        yield _encode(pieces, ends, tokenizer)


def _encode(pieces: list[str], ends: list[bool], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    encoded = tokenizer(pieces, add_special_tokens=False, return_attention_mask=False, verbose=False)
    ids: list[int] = []
    for piece_ids, ends_document in zip(encoded["input_ids"], ends, strict=True):
        ids.extend(piece_ids)
        if ends_document:
            ids.append(tokenizer.eos_token_id)
    return ids


def _texts(dataset: Dataset) -> Iterator[str]:
    with valid_text(dataset, "the data set"):
        for batch in dataset.iter(batch_size=64):
            yield from (text for text in batch["text"] if text)


def _cut(text: str) -> list[str]:
    """Split a document into pieces of at most PIECE_CHARS characters, after a newline if possible."""
    pieces = []
    start = 0
    while len(text) - start > PIECE_CHARS:
        newline = text.rfind("\n", start, start + PIECE_CHARS)
        end = newline + 1 if newline >= start else start + PIECE_CHARS
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]]
