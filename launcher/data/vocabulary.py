"""The largest token id of a tokenizer and of a data set."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
from transformers import PreTrainedTokenizerBase

from launcher.errors import ConfigError


@runtime_checkable
class TokenData(Protocol):
    """Data whose largest token id is known.

    Attributes:
        largest_id: the largest token id in the data.
        origin: a file or a data set, for messages.
    """

    largest_id: int
    origin: str


def largest_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the largest id that a tokenizer can produce.

    Ids may have gaps, so the number of tokens does not determine it.
    """
    return max([*tokenizer.get_vocab().values(), *tokenizer.all_special_ids])


def dtype_of(largest: int) -> np.dtype[np.unsignedinteger]:
    """Return the smallest dtype that holds ids up to `largest`."""
    return np.dtype("<u2" if largest <= np.iinfo("<u2").max else "<u4")


def check_vocabulary(data: object, vocabulary: int) -> None:
    """Refuse data with ids that the model has no embedding for.

    Args:
        data: checked only if it is `TokenData`.
        vocabulary: rows of the embedding.

    Raises:
        ConfigError: the data has such ids.
    """
    if isinstance(data, TokenData) and data.largest_id >= vocabulary:
        raise ConfigError(
            f"The data has the token id {data.largest_id}, but the model's vocabulary of {vocabulary} tokens ends "
            f"with {vocabulary - 1}.",
            where=data.origin,
            fix="pass the model's own tokenizer as --tokenizer, or use a model whose vocab_size is at least "
            f"{data.largest_id + 1}",
        )
