"""Row order of q, k and v in programs that fuse them into one parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from launcher.errors import CheckpointError


@dataclass(frozen=True)
class AttentionHeads:
    """The attention heads of a model.

    Args:
        queries: number of q heads.
        groups: number of k heads, and of v heads; each is shared by queries / groups q heads.
        width: rows per head.
    """

    queries: int
    groups: int
    width: int

    @classmethod
    def of(cls, config: Any) -> AttentionHeads:
        """Return the heads of a transformers config.

        Raises:
            CheckpointError: the number of q heads is not a multiple of the number of k and v heads.
        """
        queries = int(config.num_attention_heads)
        groups = int(getattr(config, "num_key_value_heads", None) or queries)
        width = int(getattr(config, "head_dim", None) or config.hidden_size // queries)
        found = cls(queries, groups, width)
        if queries % groups:
            raise found._of_no_model()
        return found

    def __str__(self) -> str:
        keys = "" if self.groups == self.queries else f", {self.groups} key/value heads"
        return f"{self.queries} heads{keys}, head_dim {self.width}"

    def _of_no_model(self) -> CheckpointError:
        return CheckpointError(
            f"Invalid attention heads: {self}.",
            where="--model: num_attention_heads, num_key_value_heads, head_dim",
            fix="set --model to the model that was trained",
        )

    @property
    def rows(self) -> int:
        """Return the total number of rows of q, k and v."""
        return (self.queries + 2 * self.groups) * self.width

    def by_group(self) -> Tensor:
        """Return the row indices of the concatenation of q, k and v, ordered by group.

        A group has the q heads that share a k head and a v head, then this k head, then this v head.
        """
        numbers = torch.arange(self.rows)
        q, k, v = numbers.split([count * self.width for count in (self.queries, self.groups, self.groups)])
        return torch.cat([part.view(self.groups, -1) for part in (q, k, v)], dim=1).view(-1)

    def places(self, kind: str) -> Tensor:
        """Return the positions of the rows of "q", "k" or "v" in the order of `by_group`."""
        first = {"q": 0, "k": self.queries, "v": self.queries + self.groups}[kind] * self.width
        return self.by_group().argsort()[first : first + self.count(kind)]

    def count(self, kind: str) -> int:
        """Return the number of rows of "q", "k" or "v"."""
        return (self.queries if kind == "q" else self.groups) * self.width

    def from_neighbours(self, rows: Tensor) -> Tensor:
        """Reorder rows of whole heads for transformers' rotary embedding.

        It pairs row i of a head with row i + half; the given rows are ordered for pairs of adjacent rows.

        Raises:
            CheckpointError: a head has an odd number of rows.
        """
        if self.width % 2:
            raise self._of_no_model()
        return rows.view(-1, self.width // 2, 2).transpose(1, 2).reshape(-1)
