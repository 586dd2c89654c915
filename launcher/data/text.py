"""Loads data named on the command line as documents: a `datasets.Dataset` with one column, `text`."""

from __future__ import annotations

import logging
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, concatenate_datasets, load_dataset

from launcher.data.cache import cache_key
from launcher.errors import ConfigError
from launcher.hub import unreachable

logger = logging.getLogger(__name__)

EVAL_FRACTION = 0.01
REPLACED = "\ufffd"
SUFFIXES = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
ACCEPTED = (
    "pass `stdlib`, a Hugging Face dataset id (`owner/name` or `owner/name:config`), "
    "a .txt, .jsonl, .json or .parquet file, or a directory of them"
)
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def load_text(dataset: str, *, split: str = "train") -> Dataset:
    """Load the documents of `dataset`, one per row, in the column `text`.

    Args:
        dataset: `stdlib` (Python's documentation topics and the sources of its standard library), a Hugging
            Face dataset id, a local .txt (one document per file), .jsonl, .json or .parquet file, or a
            directory of them.
        split: `train`, `eval` or `all`. The eval split is the end of the data: its last 1 % (by length), the
            same on every machine and in every run.

    Raises:
        ConfigError: there is no such data, or it has no text column.
    """
    rows = text_column(load_rows(dataset), dataset)
    if split == "all":
        return rows
    with valid_text(rows, dataset):
        return hold_out(rows, split, where=dataset)


def load_rows(dataset: str) -> Dataset:
    """Return the rows of `dataset` unchanged, with all their columns; see `load_text` for accepted names."""
    if dataset == "stdlib":
        return _documents(_stdlib_documents())
    path = Path(dataset).expanduser()
    if path.exists():
        return _load_local(path)
    if path.suffix in SUFFIXES or dataset.startswith((".", "/", "~")):
        raise ConfigError(f"No such file or directory: {dataset!r}.", where="--dataset", fix=f"{ACCEPTED}.")
    return _load_hub(dataset)


def text_column(rows: Dataset, dataset: str) -> Dataset:
    """Keep only the text column, renamed to `text`.

    It is `text`, else `content`, else the only column of strings.
    """
    strings = [n for n, f in rows.features.items() if getattr(f, "dtype", None) in ("string", "large_string")]
    named = [n for n in ("text", "content") if n in strings]
    if not named and len(strings) != 1:
        raise ConfigError(
            f"No column `text` in {dataset!r}; it has {', '.join(map(repr, rows.column_names)) or 'none'}.",
            where="--dataset",
            fix="Rename the column with the documents to `text`.",
        )
    column = (named or strings)[0]
    rows = rows.select_columns([column])
    return rows if column == "text" else rows.rename_column(column, "text")


def hold_out(rows: Dataset, split: str, *, where: str, min_eval_chars: int = 8192) -> Dataset:
    """Return the `train` or the `eval` part of the documents, cut at the same position in every process.

    Whole documents are held out from the end. If that would take more than twice the share (one huge
    document), the document is cut at the end of a line.

    Args:
        min_eval_chars: minimum number of characters to hold out (but never more than half), so that a small
            data set still yields one whole sequence.
    """
    if split not in ("train", "eval"):
        raise ConfigError(f"Unknown split {split!r} of {where!r}.", fix="Use `train`, `eval` or `all`.")
    lengths = _lengths(rows)
    total = int(lengths.sum())
    if total < 2:
        raise ConfigError(f"{where!r} contains no text.", where="--dataset")
    target = int(min(max(total * EVAL_FRACTION, min_eval_chars), total / 2))
    from_end = np.cumsum(lengths[::-1])
    count = int(np.searchsorted(from_end, max(target, 1))) + 1
    boundary = len(rows) - count
    if boundary > 0 and from_end[count - 1] <= 2 * target:
        return rows.select(range(boundary) if split == "train" else range(boundary, len(rows)))
    already = int(from_end[count - 2]) if count > 1 else 0
    return _cut_document(rows, boundary, target - already, split)


def _cut_document(rows: Dataset, index: int, held: int, split: str) -> Dataset:
    """Split document `index` near its last `held` bytes; `train` gets the part before, `eval` the rest."""
    document = rows[index]["text"]
    # A non-ASCII character is several bytes: apply the share to the document's characters.
    share = held / max(len(document.encode()), 1)
    position = min(max(len(document) - round(len(document) * share), 1), len(document) - 1)
    newline = document.find("\n", position)
    if 0 <= newline < len(document) - 1 and newline - position < held // 2:
        position = newline + 1
    part = document[:position] if split == "train" else document[position:]
    piece = _documents([part], rows.features["text"].pa_type)
    if split == "train":
        return concatenate_datasets([rows.select(range(index)), piece]) if index else piece
    if index + 1 == len(rows):
        return piece
    return concatenate_datasets([piece, rows.select(range(index + 1, len(rows)))])


def _lengths(rows: Dataset) -> np.ndarray:
    """Return the length in bytes of each document [n], from the Arrow offsets, without reading the text."""
    if rows._indices is not None:
        rows = rows.flatten_indices()
    lengths = pc.fill_null(pc.binary_length(rows.data.column("text")), 0)
    return lengths.to_numpy().astype(np.int64)


def _documents(texts: list[str], kind: pa.DataType | None = None) -> Dataset:
    """Return an in-memory dataset whose fingerprint depends only on the texts, not on the process."""
    table = pa.table({"text": pa.array(texts, type=kind or pa.large_string())})
    return Dataset(table, fingerprint=cache_key(*texts)[:16])


def _stdlib_documents() -> list[str]:
    """Return Python's documentation topics, then the sources of its standard library, sorted by path."""
    from pydoc_data.topics import topics

    root = Path(sysconfig.get_path("stdlib"))
    sources = [path for path in sorted(root.rglob("*.py")) if _is_library(path.relative_to(root))]
    if not sources:
        raise ConfigError(
            f"This Python does not have the sources of its standard library in {root}.",
            where="--dataset stdlib",
            fix="Use a Python that has them, or another data set: " + ACCEPTED + ".",
        )
    documents = [topics[name] for name in sorted(topics)]
    documents += [path.read_text(encoding="utf-8", errors="replace") for path in sources]
    return [document for document in documents if document.strip()]


def _is_library(path: Path) -> bool:
    """Return whether a path is part of the library proper.

    Tests, installed packages, machine-specific files and the topics are excluded.
    """
    if _NOT_LIBRARY & set(path.parts) or path.parts[0].startswith("config-"):
        return False
    return not path.name.startswith("_sysconfigdata") and path.parts != ("pydoc_data", "topics.py")


def _load_local(path: Path) -> Dataset:
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file())
    else:
        files = [path] if path.suffix in SUFFIXES else []
    if not files:
        raise ConfigError(
            f"No supported text file in {str(path)!r}.",
            where="--dataset",
            fix=f"{ACCEPTED}.",
        )
    kinds = dict.fromkeys(SUFFIXES[file.suffix] for file in files)
    parts = [_load_files(kind, [file for file in files if SUFFIXES[file.suffix] == kind]) for kind in kinds]
    if len(parts) == 1:
        return parts[0]
    mixed = [text_column(part, str(path)) for part in parts]
    return concatenate_datasets([part.cast(mixed[0].features) for part in mixed])


def _load_files(kind: str, paths: list[Path]) -> Dataset:
    if kind == "text":
        return _documents([_decoded(path) for path in paths])
    return _read(f"Cannot read {', '.join(map(str, paths[:3]))}", kind, data_files=[str(p) for p in paths])


def _decoded(path: Path) -> str:
    """Return the text of a file; invalid UTF-8 is replaced, and a warning is logged."""
    raw = path.read_bytes()
    text = raw.decode("utf-8", errors="replace")
    places = text.count(REPLACED) - raw.count(REPLACED.encode())
    if places:
        _tell(f"{path} is not valid UTF-8 in {places:,} places, which are read as {REPLACED} (U+FFFD)")
    return text.replace("\r\n", "\n").replace("\r", "\n")


@cache
def _tell(text: str) -> None:
    """Log a warning only once, because each split reads the files again."""
    logger.warning("%s", text)


@contextmanager
def valid_text(rows: Dataset, dataset: str) -> Iterator[None]:
    """Turn a `UnicodeDecodeError` inside the block into a `ConfigError` that counts the invalid rows."""
    try:
        yield
    except UnicodeDecodeError as error:
        table = (rows.flatten_indices() if rows._indices is not None else rows).data
        columns = [
            table.column(name) for name in table.column_names if _is_text(table.schema.field(name).type)
        ]
        wrong = sorted({row for column in columns for row in _undecodable(column)})
        first = f" (first: row {wrong[0]})" if wrong else ""
        raise ConfigError(
            f"{max(1, len(wrong)):,} rows of {dataset!r} are not valid UTF-8{first}: {error.reason}",
            where="--dataset",
            fix="convert the file: iconv -c -f utf-8 -t utf-8 OLD > NEW drops the invalid bytes",
        ) from None


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _undecodable(column: pa.ChunkedArray) -> Iterator[int]:
    for row, value in enumerate(column.cast(pa.large_binary())):
        try:
            (value.as_py() or b"").decode("utf-8")
        except UnicodeDecodeError:
            yield row


def _load_hub(name: str) -> Dataset:
    identifier, _, config = name.partition(":")
    failure = f"Cannot load {name!r} from the Hugging Face Hub"
    if not (why_not := unreachable()):
        return _read(failure, identifier, config or None)
    offline = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = True  # data sets that were loaded before are in its cache
    try:
        return _read(f"{failure} ({why_not})", identifier, config or None)
    finally:
        datasets.config.HF_HUB_OFFLINE = offline


def _read(failure: str, *args: Any, **kwargs: Any) -> Dataset:
    """Call `datasets.load_dataset(..., split="train")`; convert all errors to one that names the data."""
    try:
        return load_dataset(*args, split="train", **kwargs)
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # the library wraps the cause in "an error occurred"
            cause = cause.__cause__
        reason = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
        if isinstance(cause, StopIteration) or "corresponds to no data" in reason:
            reason = "it has no rows"
        raise ConfigError(f"{failure}: {reason}", where="--dataset", fix=f"{ACCEPTED}.") from error
