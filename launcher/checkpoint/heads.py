"""The order of the rows of q, k and v in programs that keep them as one parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from launcher.errors import CheckpointError


@dataclass(frozen=True)
class AttentionHeads:
    """The heads of a model.

    Args:
        queries: heads of q.
        groups: heads of k, and of v; some heads of q share each.
        width: rows of a head.
    """

    queries: int
    groups: int
    width: int

    @classmethod
    def of(cls, config: Any) -> AttentionHeads:
        """Return those of a model of transformers.

        Raises:
            CheckpointError: heads of q cannot share those of k and v.
        """
        queries = int(config.num_attention_heads)
        groups = int(getattr(config, "num_key_value_heads", None) or queries)
        width = int(getattr(config, "head_dim", None) or config.hidden_size // queries)
        found = cls(queries, groups, width)
        if queries % groups:
            raise found._of_no_model()
        return found

    def __str__(self) -> str:
        keys = "" if self.groups == self.queries else f", {self.groups} of keys and values"
        return f"{self.queries} heads{keys}, of {self.width} rows each"

    def _of_no_model(self) -> CheckpointError:
        return CheckpointError(
            f"No model has {self}.",
            where="--model: num_attention_heads, num_key_value_heads, head_dim",
            fix="name the model that was trained",
        )

    @property
    def rows(self) -> int:
        """Return the rows of q, k and v together."""
        return (self.queries + 2 * self.groups) * self.width

    def by_group(self) -> Tensor:
        """Return the numbers of the rows of q, k and v, which lie one after the other, by group: the heads of q that
        share a head of k and v, then that of k, then that of v."""
        numbers = torch.arange(self.rows)
        q, k, v = numbers.split([count * self.width for count in (self.queries, self.groups, self.groups)])
        return torch.cat([part.view(self.groups, -1) for part in (q, k, v)], dim=1).view(-1)

    def places(self, kind: str) -> Tensor:
        """Return where in the order of groups the rows of "q", "k" or "v" are."""
        first = {"q": 0, "k": self.queries, "v": self.queries + self.groups}[kind] * self.width
        return self.by_group().argsort()[first : first + self.count(kind)]

    def count(self, kind: str) -> int:
        """Return the rows of "q", "k" or "v"."""
        return (self.queries if kind == "q" else self.groups) * self.width

    def from_neighbours(self, rows: Tensor) -> Tensor:
        """Return rows of whole heads in the order of transformers' rotary embedding, which turns row i of a head and
        row i + half of it together, where another turns neighbouring ones.

        Raises:
            CheckpointError: a head has an odd number of rows.
        """
        if self.width % 2:
            raise self._of_no_model()
        return rows.view(-1, self.width // 2, 2).transpose(1, 2).reshape(-1)
