"""Which batch size suits many numbers of ranks, and which numbers those are. Pure arithmetic.

A batch of B sequences can be trained on n ranks when B is micro batch x accumulation x n for one of the allowed micro
batches: when n divides B / micro batch. Highly composite numbers have more divisors than any smaller number, so the
candidates for B are the micro batches and their least common multiple, each times the largest such number that keeps
it within the bound. Of the candidates the one with the most numbers of ranks wins.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from launcher.config.batch import divisors

HIGHLY_COMPOSITE = (
    *(1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080),
    *(15120, 20160, 25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640),
    *(498960, 554400, 665280, 720720),
)
"""OEIS A002182, as far as DeepSpeed's choice goes: larger factors would be another batch size than there."""


class ElasticBatch(NamedTuple):
    """Sequences per optimizer step, and the data-parallel degrees on which that works, ascending."""

    train: int
    dp_degrees: tuple[int, ...]


def elastic_batch(
    largest: int,
    micro_sizes: Sequence[int],
    *,
    least_gpus: int = 1,
    most_gpus: int = 10000,
    prefers_larger: bool = True,
    gpus_per_node: int = 1,
    gpus_per_model: int = 1,
) -> ElasticBatch | None:
    """The batch size and its degrees; None where no number of GPUs within the bounds fits.

    Args:
        largest: sequences per step, at most.
        micro_sizes: allowed micro batches, each from 1.
        least_gpus, most_gpus: of the run; rounded down to whole nodes.
        prefers_larger: which of two batch sizes that fit equally many numbers of GPUs.
        gpus_per_node: a run grows and shrinks by whole nodes of so many.
        gpus_per_model: pipeline stages x tensor-parallel ranks; divides `gpus_per_node`.
    """
    replicas = gpus_per_node // gpus_per_model  # of the model, on a node
    bound = largest // replicas  # sequences per step for one of them on every node
    least = least_gpus // gpus_per_node or 1
    most = most_gpus // gpus_per_node or bound // min(micro_sizes)
    fits = {
        size: tuple(n for n in _counts(size, micro_sizes) if least <= n <= most)
        for size in _candidates(bound, micro_sizes)
    }
    chosen = max(fits, key=lambda size: (len(fits[size]), size if prefers_larger else -size), default=0)
    if not fits.get(chosen):
        return None
    return ElasticBatch(chosen * replicas, tuple(nodes * replicas for nodes in fits[chosen]))


def micro_batch(train: int, micro_sizes: Sequence[int], dp_degree: int) -> int:
    """The largest micro batch with which `dp_degree` ranks take `train` sequences in whole microbatches; the degree is
    one of those that `elastic_batch` gave."""
    return max(size for size in micro_sizes if train // dp_degree % size == 0)


def _candidates(bound: int, micro_sizes: Sequence[int]) -> set[int]:
    bases = {*micro_sizes, math.lcm(*micro_sizes)}
    factors = {base: bisect_right(HIGHLY_COMPOSITE, bound // base) for base in bases if base <= bound}
    return {base * HIGHLY_COMPOSITE[index - 1] for base, index in factors.items()}


def _counts(size: int, micro_sizes: Sequence[int]) -> list[int]:
    """Every n for which `size` is micro batch x accumulation x n."""
    return sorted({n for micro in micro_sizes if size % micro == 0 for n in divisors(size // micro)})
