"""Converts rows of instruction data to token rows, with label -100 for tokens that are not learned.

Accepted rows:
    {"messages": [{"role": ..., "content": ...}, ...]}  loss on the assistant's messages
    {"prompt": ..., "completion": ...}                  loss on the completion
    {"text": ...}                                       loss on all tokens
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from launcher.data.documents import IGNORED, positions
from launcher.data.text import EVAL_FRACTION, load_rows, valid_text
from launcher.errors import ConfigError

logger = logging.getLogger(__name__)

PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{{ ('' if loop.first else '\\n\\n') + message['role'] + ':\\n' + message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '' }}"
    "{% endfor %}"
    "{{ '\\n\\nassistant:\\n' if add_generation_prompt else '' }}"
)
"""The chat template of a tokenizer without one: `role:`, the content, and <eos> after the assistant's."""

ROW_KINDS = '{"messages": [{"role", "content"}, ...]}, {"prompt", "completion"} or {"text"}'


class Segment(NamedTuple):
    """A part of a row's text, and whether the loss is computed on it."""

    text: str
    learned: bool


class Row(NamedTuple):
    """Token ids [n] and labels [n] of one row; in a packed row, also positions [n] in each conversation."""

    input_ids: np.ndarray
    labels: np.ndarray
    positions: np.ndarray | None = None


class SftDataset(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Items are {"input_ids", "labels"} and "attention_mask" (padded) or "position_ids" (packed): LongTensors
    [seq_length].

    Args:
        rows: tokens and labels, at most `seq_length` each.
        seq_length: length of the items.
        pad_id: token that fills up rows that are not packed.
        n_truncated: number of conversations that were truncated because they were too long.
        n_dropped: number of conversations that were dropped because they have no tokens to learn.
        origin: source of the rows, for messages.
        digest: checksum of the tokens and labels of all conversations, before truncation.

    Attributes:
        largest_id: the largest token id, including `pad_id`.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        seq_length: int,
        pad_id: int,
        *,
        n_truncated: int,
        n_dropped: int,
        origin: str,
        digest: str,
    ) -> None:
        self._rows = rows
        self.seq_length = seq_length
        self.pad_id = pad_id
        self.n_truncated = n_truncated
        self.n_dropped = n_dropped
        self.origin = origin
        self.digest = digest
        self.largest_id = max(pad_id, *(int(row.input_ids.max()) for row in rows))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self._rows[index]
        if row.positions is not None:
            return {
                "input_ids": _long(row.input_ids),
                "labels": _long(row.labels),
                "position_ids": _long(row.positions),
            }
        missing = self.seq_length - len(row.input_ids)
        mask = np.arange(self.seq_length) < len(row.input_ids)
        return {
            "input_ids": _long(np.pad(row.input_ids, (0, missing), constant_values=self.pad_id)),
            "labels": _long(np.pad(row.labels, (0, missing), constant_values=IGNORED)),
            "attention_mask": _long(mask),
        }


def load_sft(
    dataset: str,
    tokenizer: PreTrainedTokenizerBase,
    seq_length: int,
    *,
    split: str = "train",
    packed: bool = False,
) -> SftDataset:
    """Load instruction data for `finetune`.

    Every conversation, completion and text ends with <eos>. Conversations are formatted with the
    tokenizer's chat template; if it has none, it gets `PLAIN_TEMPLATE`, which is then saved with the model.
    Rows longer than `seq_length` are truncated, and rows without anything to learn are dropped; both are
    counted and logged.

    Args:
        dataset: a .jsonl, .json or .parquet file, a directory of them, or a Hugging Face dataset id.
        tokenizer: a fast tokenizer (it maps each token to characters).
        seq_length: tokens per item.
        split: `train`, `eval` or `all`; the eval split is the last 1 % of the rows, at least one.
        packed: False pads each conversation to `seq_length` and adds an `attention_mask`; True packs them end
            to end into full rows and adds `position_ids`, which restart at each conversation, so that none
            attends to those before it in its row. The remainder is dropped; in the eval split it is padded.

    Raises:
        ConfigError: unsupported rows, or nothing to learn.
    """
    if not tokenizer.is_fast or tokenizer.eos_token_id is None:
        raise ConfigError(
            f"The tokenizer {tokenizer.name_or_path!r} is not a fast tokenizer with an eos_token.",
            where="--tokenizer",
            fix="Use a tokenizer with a tokenizer.json and an eos_token.",
        )
    rows = _split(load_rows(dataset), split, dataset)
    if not tokenizer.chat_template and "messages" in rows.column_names:
        tokenizer.chat_template = PLAIN_TEMPLATE
    with valid_text(rows, dataset):
        encoded = [
            encode(segments(row, tokenizer, f"{dataset} row {i}"), tokenizer) for i, row in enumerate(rows)
        ]
    n_truncated = 0 if packed else sum(len(row.input_ids) > seq_length for row in encoded)
    kept = (
        encoded if packed else [Row(row.input_ids[:seq_length], row.labels[:seq_length]) for row in encoded]
    )
    kept = [row for row in kept if (row.labels[1:] != IGNORED).any()]  # no position predicts the first label
    n_dropped = len(encoded) - len(kept)
    if n_truncated or n_dropped:
        logger.warning(
            "%s: of %d rows, %d were truncated to %d tokens and %d were dropped (no target tokens)",
            dataset, len(encoded), n_truncated, seq_length, n_dropped,
        )  # fmt: skip
    pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    items = _packed(kept, seq_length, pad_id if split == "eval" else None) if packed else kept
    if packed and kept and not items:
        raise ConfigError(
            f"The split {split!r} of {dataset!r} does not fill one sequence of {seq_length} tokens.",
            where="--packed",
            fix="Use more rows, a shorter --seq-length, or no --packed.",
        )
    if not items:
        raise ConfigError(
            f"No target tokens in {len(encoded)} rows of {dataset!r} with sequences of {seq_length} tokens.",
            where="--seq-length",
            fix="Use more rows, or another --seq-length (a prompt alone may fill a sequence).",
        )
    return SftDataset(
        items, seq_length, pad_id,
        n_truncated=n_truncated, n_dropped=n_dropped, origin=dataset, digest=_digest(encoded),
    )  # fmt: skip


def segments(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, where: str) -> list[Segment]:
    """Return the parts of a row's text in order, marked as learned or not.

    Raises:
        ConfigError: the row's format is not supported.
    """
    eos = str(tokenizer.eos_token)
    if row.get("messages"):
        return _templated(row["messages"], tokenizer, where)
    if row.get("prompt") is not None and row.get("completion") is not None:
        return [Segment(row["prompt"], False), Segment(row["completion"] + eos, True)]
    if row.get("text"):
        return [Segment(row["text"] + eos, True)]
    raise ConfigError(
        f"unsupported row format (columns: {', '.join(map(repr, row)) or 'none'})",
        where=where,
        fix=f"Use rows of the form {ROW_KINDS}.",
    )


def prompt_tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the prompt tokens for `text`, as the user's message if there is a chat template."""
    if tokenizer.chat_template:
        text = _render([{"role": "user", "content": text}], tokenizer, for_answer=True)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def encode(parts: Sequence[Segment], tokenizer: PreTrainedTokenizerBase) -> Row:
    """Tokenize the whole text at once, as the model will read it, and label the tokens of learned parts.

    A token that spans the boundary between a prompt and an answer belongs to the prompt.
    """
    text = "".join(part.text for part in parts)
    learned = np.zeros(len(text) + 1, dtype=bool)
    position = 0
    for part in parts:
        learned[position : position + len(part.text)] = part.learned
        position += len(part.text)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = np.asarray(encoded["input_ids"], dtype=np.int32)
    starts = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)[:, 0]
    return Row(ids, np.where(learned[starts], ids, IGNORED).astype(np.int32))


def _digest(rows: Sequence[Row]) -> str:
    hashed = xxhash.xxh3_64()
    for row in rows:
        for values in (np.array([len(row.input_ids)], dtype="<i4"), row.input_ids, row.labels):
            hashed.update(values.tobytes())
    digest: str = hashed.hexdigest()
    return digest


def _templated(
    messages: Sequence[Mapping[str, str]], tokenizer: PreTrainedTokenizerBase, where: str
) -> list[Segment]:
    """Split a templated conversation into parts; what is added for an assistant message is learned."""
    whole = _render(messages, tokenizer)
    parts: list[Segment] = []
    position = 0
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = _render(messages[:i], tokenizer, for_answer=True)
        answered = _render(messages[: i + 1], tokenizer)
        if not (whole.startswith(answered) and answered.startswith(prompt)):
            raise ConfigError(
                "The tokenizer's chat template changes earlier messages when later ones follow, so the "
                "assistant's tokens cannot be identified.",
                where=where,
                fix="Split the conversation into rows that end with each answer, or use prompt and completion.",
            )
        parts += [
            Segment(whole[position : len(prompt)], False),
            Segment(whole[len(prompt) : len(answered)], True),
        ]
        position = len(answered)
    return [*parts, Segment(whole[position:], False)]


def _render(
    messages: Sequence[Mapping[str, str]], tokenizer: PreTrainedTokenizerBase, *, for_answer: bool = False
) -> str:
    plain = [dict(message) for message in messages]
    return str(tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=for_answer))


def _packed(rows: Sequence[Row], seq_length: int, fill: int | None) -> list[Row]:
    """Pack rows end to end into items of `seq_length`; no loss is computed on the first token of a row.

    Args:
        fill: token that fills the last item; None drops what does not fill one.
    """
    if not rows:
        return []
    if fill is not None and (missing := -sum(len(row.labels) for row in rows) % seq_length):
        rows = [*rows, Row(np.full(missing, fill, np.int32), np.full(missing, IGNORED, np.int32))]
    ids = np.concatenate([row.input_ids for row in rows])
    labels = np.concatenate([row.labels for row in rows])
    starts = np.zeros(len(ids), dtype=bool)
    starts[np.cumsum([0, *(len(row.labels) for row in rows[:-1])])] = True
    labels[starts] = IGNORED
    cuts = [slice(i, i + seq_length) for i in range(0, len(ids) - seq_length + 1, seq_length)]
    items = [Row(ids[cut], labels[cut], positions(starts[cut])) for cut in cuts]
    return [item for item in items if (item.labels[1:] != IGNORED).any()]


def _split(rows: Dataset, split: str, where: str) -> Dataset:
    if split == "all":
        return rows
    if split not in ("train", "eval") or len(rows) < 2:
        raise ConfigError(
            f"Cannot take the split {split!r} of the {len(rows)} rows in {where!r}.",
            fix="`train` and `eval` need at least two rows; `all` takes every row.",
        )
    boundary = len(rows) - max(1, round(len(rows) * EVAL_FRACTION))
    return rows.select(range(boundary) if split == "train" else range(boundary, len(rows)))


def _long(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64))
