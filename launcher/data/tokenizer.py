"""A tokenizer for the model: its own, a named one, bytes, or a BPE trained on the data set."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from launcher.data.cache import build_once, cache_key, default_cache_dir
from launcher.data.text import valid_text
from launcher.data.vocabulary import largest_id
from launcher.errors import ConfigError
from launcher.hub import unreachable

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
BYTE_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt",
)  # fmt: skip
_SAVED = (
    *_TOKENIZER_FILES, "special_tokens_map.json", "added_tokens.json", "merges.txt", "sentencepiece.bpe.model",
    "chat_template.jinja", "chat_template.json", "additional_chat_templates",
)  # fmt: skip


def load_tokenizer(name: str | None, model_dir: str | None, vocab_size: int) -> PreTrainedTokenizerFast:
    """Return the tokenizer for a model whose embedding has `vocab_size` rows.

    Args:
        name: a Hugging Face id or a directory (`--tokenizer`); None: the model's own.
        model_dir: the model's directory or Hugging Face id. None, a bare `config.json` or a directory without
            tokenizer files selects the byte-level tokenizer.
        vocab_size: rows of the embedding.

    Raises:
        ConfigError: there is nothing to load, or there are more tokens than the embedding has rows.
    """
    source = name or _own_tokenizer(model_dir)
    if source is None:
        return byte_tokenizer(vocab_size)
    why_not = "" if Path(source).exists() else unreachable()
    try:
        loaded = AutoTokenizer.from_pretrained(source, local_files_only=bool(why_not))
        tokenizer = cast(PreTrainedTokenizerFast, loaded)
    except Exception as error:
        reason = why_not or (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"Cannot load a tokenizer from {source!r}: {reason}",
            where="--tokenizer" if name else "--model",
            fix="Pass a Hugging Face id or a directory with tokenizer.json as --tokenizer.",
        ) from error
    largest = largest_id(tokenizer)
    if largest >= vocab_size:
        raise ConfigError(
            f"Tokenizer {source!r} has {len(tokenizer)} tokens, the largest id is {largest}, but the model's "
            f"vocab_size is {vocab_size}.",
            where="--tokenizer" if name else "--model",
            fix=f"Set vocab_size >= {largest + 1} in the model's config, or use another tokenizer.",
        )
    return tokenizer


def byte_tokenizer(vocab_size: int = BYTE_VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """Return the byte-level tokenizer, whose decoding is exact.

    Ids 0..255 are the bytes of UTF-8; <pad>, <bos>, <eos>, <unk> are 256..259.

    Raises:
        ConfigError: `vocab_size` is below 260.
    """
    if vocab_size < BYTE_VOCAB_SIZE:
        raise ConfigError(
            f"vocab_size {vocab_size} is too small for the byte-level tokenizer: "
            f"256 bytes and {len(SPECIAL_TOKENS)} special tokens need {BYTE_VOCAB_SIZE}.",
            where="the model's config.json: vocab_size",
            fix=f"Set vocab_size >= {BYTE_VOCAB_SIZE}, or pass another tokenizer as --tokenizer.",
        )
    return _wrap(_byte_level(_base_vocab(), [], split_words=False))


def train_tokenizer(
    dataset: Dataset, n_tokens: int, cache_dir: str | Path | None = None
) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE of exactly `n_tokens` tokens, trained on column `text` (`--train-tokenizer N`).

    Ids 0..259 are those of `byte_tokenizer`. It is trained once and cached, so that every rank has the same.

    Raises:
        ConfigError: `n_tokens` is below 260, or the text has too few distinct pairs for that many tokens.
    """
    if n_tokens < BYTE_VOCAB_SIZE:
        raise ConfigError(
            f"{n_tokens} tokens are too few: the bytes and the special tokens alone take {BYTE_VOCAB_SIZE}.",
            where="--train-tokenizer",
            fix=f"Use at least {BYTE_VOCAB_SIZE} tokens.",
        )
    key = cache_key("bpe-1", dataset._fingerprint, n_tokens)
    final = Path(cache_dir or default_cache_dir()) / "tokenizers" / key

    def build(directory: Path) -> None:
        _train(dataset, n_tokens).save_pretrained(str(directory))

    return PreTrainedTokenizerFast.from_pretrained(str(build_once(final, build)))


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Save a tokenizer next to the weights: its original files, chat template included, unless it changed."""
    source = Path(tokenizer.name_or_path).expanduser()
    files = [source / name for name in _SAVED if (source / name).exists()] if tokenizer.name_or_path else []
    if not files or not _alike(tokenizer, AutoTokenizer.from_pretrained(source)):
        tokenizer.save_pretrained(str(directory))
    elif source.resolve() != directory.resolve():
        for file in files:
            if file.is_dir():
                shutil.copytree(file, directory / file.name, dirs_exist_ok=True)
            else:
                shutil.copyfile(file, directory / file.name)


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of everything that determines the ids.

    Padding and truncation are excluded: they do not, and calls of the tokenizer change them.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        rules: Any = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    else:
        rules = json.loads(backend.to_str()) | {"padding": None, "truncation": None}
    return cache_key(json.dumps(rules, sort_keys=True), tokenizer.eos_token_id)


def _alike(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    names = ("chat_template", "special_tokens_map", "model_max_length", "padding_side", "truncation_side")
    return fingerprint(one) == fingerprint(other) and all(
        getattr(one, name) == getattr(other, name) for name in names
    )


def _train(dataset: Dataset, n_tokens: int) -> PreTrainedTokenizerFast:
    tokenizer = _byte_level(_base_vocab(), [], split_words=True)
    trainer = trainers.BpeTrainer(
        vocab_size=n_tokens - len(SPECIAL_TOKENS),
        initial_alphabet=list(_byte_characters()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(dataset), trainer, length=len(dataset))
    trained = json.loads(tokenizer.to_str())["model"]
    # The trainer numbers the alphabet in its own order; here bytes and special tokens keep their ids.
    merged = [token for token, _ in sorted(trained["vocab"].items(), key=lambda item: item[1])]
    vocab = _base_vocab()
    for token in merged:
        vocab.setdefault(token, len(vocab))
    if len(vocab) < n_tokens:
        raise ConfigError(
            f"The data set has enough pairs for only {len(vocab)} tokens, but {n_tokens} were requested.",
            where="--train-tokenizer",
            fix=f"Use at most {len(vocab)} tokens, or more text.",
        )
    return _wrap(_byte_level(vocab, [tuple(merge) for merge in trained["merges"]], split_words=True))


def _own_tokenizer(model_dir: str | None) -> str | None:
    """Return the location of the model's own tokenizer; None for a bare config or a directory without one."""
    if model_dir is None:
        return None
    path = Path(model_dir).expanduser()
    if path.is_file() or path.suffix == ".json":
        return None
    if path.is_dir():
        return str(path) if any((path / file).is_file() for file in _TOKENIZER_FILES) else None
    return model_dir


def _texts(dataset: Dataset) -> Iterator[list[str]]:
    with valid_text(dataset, "the data set"):
        for batch in dataset.iter(batch_size=64):
            yield [text for text in batch["text"] if text]


def _byte_characters() -> dict[str, int]:
    """Map the characters of byte-level BPE (GPT-2, Radford et al. 2019) to the bytes they stand for."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): byte for byte in printable}
    characters.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return characters


def _base_vocab() -> dict[str, int]:
    return _byte_characters() | {token: 256 + i for i, token in enumerate(SPECIAL_TOKENS)}


def _byte_level(vocab: dict[str, int], merges: list[tuple[str, str]], *, split_words: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split_words)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    pad, bos, eos, unk = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        unk_token=unk,
        clean_up_tokenization_spaces=False,
    )
