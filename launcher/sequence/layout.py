"""Assigns positions of a sequence to ranks of the cp axis.

The axis is ring x ulysses, with ulysses innermost. A chunk is one of `ring` equal parts of the sequence, held
by one Ulysses group. Each rank of the group has a slice of the chunk.

```
ring 2, 8 positions     chunk 0        chunk 1
contiguous              0 1 2 3        4 5 6 7
zigzag                  0 1 6 7        2 3 4 5      the same number of pairs (query, key before it) in each chunk
striped                 0 2 4 6        1 3 5 7
```
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from launcher.config import ContextParallelConfig
from launcher.errors import ConfigError

KINDS = ("zigzag", "contiguous", "striped")


@dataclass(frozen=True)
class SequenceLayout:
    """How sequences are sharded.

    Args:
        kind: one of `KINDS`.
        ring, ulysses: degree of each; their product is the cp degree.
    """

    kind: str
    ring: int
    ulysses: int

    @property
    def multiple(self) -> int:
        """Return the number of which every padded length is a multiple."""
        return self.ring * self.ulysses * (2 if self.kind == "zigzag" and self.ring > 1 else 1)

    def in_words(self) -> str:
        """Return a description such as "Ulysses 2 x ring 2, zigzag"."""
        ring = f"ring {self.ring}, {self.kind}" if self.ring > 1 else ""
        heads = f"Ulysses {self.ulysses}" if self.ulysses > 1 else ""
        return " x ".join(filter(None, [heads, ring]))

    def padded(self, length: int) -> int:
        """Return the length after padding."""
        return -(-length // self.multiple) * self.multiple

    def runs(self, length: int, chunk: int) -> tuple[range, ...]:
        """Return the positions of a chunk in order, as one or two evenly spaced runs.

        Args:
            length: length of the padded sequence.
            chunk: 0 .. ring - 1.
        """
        if self.ring == 1:
            return (range(length),)
        if self.kind == "striped":
            return (range(chunk, length, self.ring),)
        parts = self.ring * (2 if self.kind == "zigzag" else 1)
        size = length // parts
        first = range(chunk * size, (chunk + 1) * size)
        if self.kind == "contiguous":
            return (first,)
        last = parts - 1 - chunk
        return first, range(last * size, (last + 1) * size)

    def positions(self, length: int, rank: int) -> Tensor:
        """Return the positions of one rank of the axis: int64 [length / degree]."""
        return _positions(self, length, rank)

    def order(self, length: int) -> Tensor:
        """Return the positions of all ranks in rank order: int64 [length]."""
        return torch.cat([self.positions(length, rank) for rank in range(self.ring * self.ulysses)])


def planned(model: Any, degree: int, section: ContextParallelConfig, *, tp: int) -> SequenceLayout:
    """Return the layout for a model. Unless configured, the Ulysses degree is the largest that the heads of a
    rank allow, because Ulysses communicates least; a ring covers the rest.

    Args:
        degree: cp degree.
        tp: tp degree, over which the heads are split.

    Raises:
        ConfigError: the Ulysses degree does not divide both the heads of a rank and the cp degree.
    """
    ulysses, ring = section.ulysses, section.ring
    heads = _heads_of(model) // tp
    if not ulysses and ring:
        ulysses = degree // ring
    if not ulysses:
        ulysses = max(size for size in range(1, degree + 1) if degree % size == 0 and heads % size == 0)
    if heads % ulysses or degree % ulysses:
        fitting = [size for size in range(1, degree + 1) if degree % size == 0 and heads % size == 0]
        raise ConfigError(
            f"ulysses {ulysses} must divide both the {heads} attention heads of a rank and the context-parallel "
            f"degree {degree}",
            where="context_parallel.ulysses",
            fix=f"use one of {', '.join(map(str, fitting))}; a ring over the remaining ranks is chosen automatically",
        )
    return SequenceLayout(section.layout, degree // ulysses, ulysses)


def _heads_of(model: Any) -> int:
    """Return the number of attention heads of a layer; 1 if layers differ, so that a ring is chosen."""
    try:
        return int(getattr(model.config.get_text_config(), "num_attention_heads", 1))
    except Exception:  # raised by transformers: the config has one number per layer
        return 1


@lru_cache(maxsize=64)
def _positions(layout: SequenceLayout, length: int, rank: int) -> Tensor:
    chunk, place = divmod(rank, layout.ulysses)
    whole = torch.tensor(list(chain(*layout.runs(length, chunk))))
    size = length // (layout.ring * layout.ulysses)
    return whole[place * size : (place + 1) * size]
