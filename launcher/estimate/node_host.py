"""The host memory of a node: offloaded data of its ranks, and an interpreter with libraries for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.estimate.answer import Estimate
from launcher.sizes import in_words


@dataclass(frozen=True)
class NodeHost:
    """The host memory of a node. Bytes are those of the rank that needs the most.

    Args:
        ranks: number of ranks on the node.
        offloaded: bytes of offloaded shards and of copies for background saves.
        process: bytes of Python, torch and transformers, before a model is created.
        tensors: bytes of the run's other tensors if the device is the host; else 0.
    """

    ranks: int
    offloaded: int
    process: int
    tensors: int = 0

    @classmethod
    def of(cls, found: Sequence[Estimate], ranks: int, process: int, *, on_host: bool) -> NodeHost:
        """Return the host memory of a node.

        Args:
            found: estimates of ranks.
            on_host: whether the run is on CPUs, with all tensors in host memory.
        """
        most = max(found, key=lambda one: one.host + one.peak * on_host)
        return cls(ranks, most.host, process, most.peak * on_host)

    @property
    def total(self) -> int:
        return self.ranks * (self.offloaded + self.process + self.tensors)

    def in_words(self) -> str:
        """Return "12.80 GiB per node: 8 ranks x (1.10 GiB offloaded + 0.50 GiB Python and libraries)"."""
        parts = [
            (self.tensors, "tensors"),
            (self.offloaded, "offloaded"),
            (self.process, "Python and libraries"),
        ]
        each = " + ".join(f"{in_words(size)} {what}" for size, what in parts if size)
        number = f"{self.ranks} ranks x ({each})" if self.ranks > 1 else each
        return f"{in_words(self.total)} per node: {number}"
