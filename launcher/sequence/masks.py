"""Attention masks as rules: which keys a query may see, by their positions in the full sequence.

For a block of queries and keys, a rule returns whether all, none or some of the pairs are allowed, and in the
last case which. transformers composes masks from small functions (`masking_utils`); `rules_of` translates
them into rules. An unknown function is rejected: it might index the batch by position, and a rank's slice has
other positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from launcher.errors import ConfigError


class Visibility(Enum):
    """Whether all, some or none of the pairs of a block are allowed."""

    NONE = "none"
    SOME = "some"
    ALL = "all"


class MaskRule(Protocol):
    """Decides which pairs of a query and a key are allowed."""

    def of_block(self, queries: range, keys: range) -> Visibility:
        """Return how many pairs of a block are allowed, in O(1) or O(length)."""
        ...

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return bool [batch or 1, 1, queries, keys] for positions [queries, 1] and [1, keys]."""
        ...


@dataclass(frozen=True)
class Causal:
    """Hides keys after the query."""

    def of_block(self, queries: range, keys: range) -> Visibility:
        if keys[0] > queries[-1]:
            return Visibility.NONE
        return Visibility.ALL if keys[-1] <= queries[0] else Visibility.SOME

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        return (keys <= queries)[None, None]


@dataclass(frozen=True)
class Window:
    """Hides keys `size` or more positions before the query (sliding window)."""

    size: int

    def of_block(self, queries: range, keys: range) -> Visibility:
        if keys[-1] <= queries[0] - self.size:
            return Visibility.NONE
        return Visibility.ALL if keys[0] > queries[-1] - self.size else Visibility.SOME

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        return (keys > queries - self.size)[None, None]


@dataclass(frozen=True, eq=False)
class SameGroup:
    """Hides keys outside the query's group: its document, or its chunk of the sequence.

    Args:
        groups: int64 [batch or 1, length], non-decreasing along the sequence.
    """

    groups: Tensor

    def of_block(self, queries: range, keys: range) -> Visibility:
        of_queries, of_keys = self.groups[:, _slice(queries)], self.groups[:, _slice(keys)]
        first, last, lowest, highest = of_queries[:, 0], of_queries[:, -1], of_keys[:, 0], of_keys[:, -1]
        if bool(((first > highest) | (last < lowest)).all()):
            return Visibility.NONE
        one = (first == last) & (lowest == highest) & (first == lowest)
        return Visibility.ALL if bool(one.all()) else Visibility.SOME

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        return (self.groups[:, queries.squeeze(1), None] == self.groups[:, None, keys.squeeze(0)])[:, None]


@dataclass(frozen=True, eq=False)
class Kept:
    """Hides keys that are padding.

    Args:
        keys: bool [batch, length]; false: padding.
    """

    keys: Tensor

    def of_block(self, queries: range, keys: range) -> Visibility:
        kept = self.keys[:, _slice(keys)]
        if not bool(kept.any()):
            return Visibility.NONE
        return Visibility.ALL if bool(kept.all()) else Visibility.SOME

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        return self.keys[:, None, None, keys.squeeze(0)]


@dataclass(frozen=True)
class Block:
    """The pairs of a range of queries and a range of keys.

    Args:
        visibility: how many of the pairs are allowed.
        causal: the block is square and exactly the pairs up to its diagonal are allowed.
        mask: bool [batch or 1, 1, queries, keys]; only for `SOME` if not `causal`.
    """

    visibility: Visibility
    causal: bool = False
    mask: Tensor | None = None


class MaskIsNoTensorError(ConfigError, AttributeError):
    """Raised if a model does anything with its mask other than pass it to attention."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"a layer {what}, which is not a tensor under context parallelism",
            where="context_parallel",
            fix="remove the section for this model, or use tensor parallelism instead (tensor_parallel)",
        )


@dataclass(frozen=True, eq=False)
class AttentionMask:
    """All rules of a layer type in one forward. It passes through the model in place of a mask tensor.

    Args:
        rules: a pair is allowed if all rules allow it.
        sequence: the `SharedSequence` of the forward (`inputs.py`).
        device: device of the masks.
    """

    rules: tuple[MaskRule, ...]
    sequence: Any
    device: torch.device
    _found: dict[tuple[range, range], list[Visibility]] = field(default_factory=dict)
    _blocks: dict[tuple[range, range], Block] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise MaskIsNoTensorError(f"accesses the attribute {name} of its attention mask")

    def __getitem__(self, key: Any) -> Any:
        raise MaskIsNoTensorError("indexes its attention mask")

    def visibility(self, queries: range, keys: range) -> Visibility:
        """Return whether all rules together allow all, some or none of the pairs of a block."""
        found = self._of_rules(queries, keys)
        if Visibility.NONE in found:
            return Visibility.NONE
        return Visibility.SOME if Visibility.SOME in found else Visibility.ALL

    def block(self, queries: range, keys: range) -> Block:
        """Return the block of these queries and keys, cached for the layers that follow."""
        if (queries, keys) not in self._blocks:
            self._blocks[queries, keys] = self._make(queries, keys)
        return self._blocks[queries, keys]

    def _of_rules(self, queries: range, keys: range) -> list[Visibility]:
        """Return the visibility under each rule, cached for all layers, because some rules read the batch."""
        if (queries, keys) not in self._found:
            self._found[queries, keys] = [rule.of_block(queries, keys) for rule in self.rules]
        return self._found[queries, keys]

    def _make(self, queries: range, keys: range) -> Block:
        visibility = self.visibility(queries, keys)
        if visibility is not Visibility.SOME:
            return Block(visibility)
        found = zip(self.rules, self._of_rules(queries, keys), strict=True)
        active = [rule for rule, answer in found if answer is not Visibility.ALL]
        if active == [Causal()] and queries == keys:
            return Block(Visibility.SOME, causal=True)
        rows = torch.tensor(queries, device=self.device)[:, None]
        columns = torch.tensor(keys, device=self.device)[None, :]
        mask = active[0].allowed(rows, columns)
        for rule in active[1:]:
            mask = mask & rule.allowed(rows, columns)
        return Block(Visibility.SOME if bool(mask.any()) else Visibility.NONE, mask=mask)


def rules_of(function: Callable[..., Any], places: Tensor) -> list[MaskRule]:
    """Translate a mask function of transformers into rules.

    Args:
        function: as transformers passes it to a mask interface.
        places: int64 [batch or 1, padded length]: position of each token in its document.

    Raises:
        ConfigError: the function is unknown.
    """
    kind = getattr(function, "__qualname__", repr(function)).removesuffix(".<locals>.inner_mask")
    inside = _captured(function)
    if kind == "causal_mask_function":
        return [Causal()]
    if kind == "bidirectional_mask_function":
        return []
    if kind == "sliding_window_overlay":
        return [Window(int(inside["sliding_window"]))]
    if kind == "chunked_overlay":
        places = places - inside["left_padding"].to(places.device)[:, None]
        chunks = places.div(inside["chunk_size"], rounding_mode="floor")
        # chunk numbers restart with each document; the cumulative sum of their changes is non-decreasing
        return [SameGroup(pad((chunks.diff(dim=1) != 0), (1, 0)).cumsum(1))]
    if kind == "and_masks.<locals>.and_mask":
        return [rule for one in inside["mask_functions"] for rule in rules_of(one, places)]
    raise ConfigError(
        f"attention masks created by {kind} are not supported under context parallelism",
        where="context_parallel",
        fix="remove the section for this model",
    )


def _captured(function: Callable[..., Any]) -> dict[str, Any]:
    code = getattr(function, "__code__", None)
    cells: Sequence[Any] = getattr(function, "__closure__", None) or ()
    return (
        {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)} if code else {}
    )


def _slice(positions: range) -> slice:
    return slice(positions.start, positions.stop, positions.step)
