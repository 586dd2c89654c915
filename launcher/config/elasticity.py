"""`elasticity`: a batch size that many numbers of ranks can train with, so that a run may go on with fewer or more.

A batch of B sequences can be trained on n ranks when B is micro batch x accumulation x n for one of the allowed micro
batches: when n divides B / micro batch. Highly composite numbers have more divisors than any smaller number, so the
candidates for B are the micro batches and their least common multiple, each times the largest such number that keeps
it within the bound. Of the candidates the one with the most numbers of ranks wins.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from pydantic import BeforeValidator

from launcher.config.problems import Problem, show
from launcher.config.ranks import BATCH_KEYS, BatchError, BatchTriple, divisors
from launcher.config.section import AUTO, Count, Section, WholeNumber, WholeNumbers, complaint

if TYPE_CHECKING:
    from launcher.config.root import Config

SHOWN = 12
"""Numbers of a list that a message shows."""


def _version(value: Any) -> Any:
    if isinstance(value, bool) or value not in (0.1, 0.2):
        raise complaint(f"must be 0.1 or 0.2, not {show(value)}", "write 0.2, or leave it out")
    return float(value)


class ElasticityConfig(Section):
    """Batch sizes for many numbers of ranks. While it is on, train_batch_size, the micro batch and the accumulation
    follow from it and from the number of ranks; a step takes the same sequences on every number that it allows.

    A batch size is looked for that is at most `max_train_batch_size`, that splits into whole microbatches of one of
    `micro_batch_sizes` on as many numbers of GPUs as possible, and so the numbers of GPUs follow, too:
    `launch check --num-gpus N` tells them. Others are refused. With `--min_nodes` a restart goes on with the largest
    allowed number of the ranks that are left.
    """

    without_effect: ClassVar[dict[str, str]] = {
        "min_time": "the number of ranks changes only at a restart, and no run is restarted to change it",
    }
    differs: ClassVar[dict[str, str]] = {
        "enabled": "DeepSpeed had it until 0.19.6; 0.19.8 refuses the section",
        "version": "0.2 also refuses numbers of ranks that are not allowed; DeepSpeed uses another batch size there",
        "model_parallel_size": "must be pipeline stages x tensor-parallel ranks of this file",
    }

    enabled: bool = False
    """The batch keys follow from this section."""

    max_train_batch_size: Count | None = None
    """Sequences per optimizer step, at most; it must be written."""

    micro_batch_sizes: WholeNumbers | None = None
    """Sequences per rank and forward pass that are allowed; of those that fit the largest is taken. It must be
    written."""

    min_gpus: Count = 1
    """Fewest GPUs of a run; version 0.2 rounds down to whole nodes."""

    max_gpus: Count = 10000
    """Most GPUs of a run; version 0.2 rounds down to whole nodes."""

    min_time: WholeNumber = 0
    """Minutes that a scheduler lets pass before it changes the number of GPUs."""

    version: Annotated[float, BeforeValidator(_version)] = 0.2
    """0.1 counts GPUs; 0.2 counts nodes of `num_gpus_per_node` GPUs, and knows `model_parallel_size`."""

    ignore_non_elastic_batch_info: bool = False
    """Batch keys that are written, or given by the run, are overridden; false: they are an error."""

    prefer_larger_batch: bool = True
    """The larger of two batch sizes that fit equally many numbers of GPUs is taken."""

    num_gpus_per_node: Count = 1
    """Version 0.2: a run grows and shrinks by whole nodes of so many GPUs."""

    model_parallel_size: Count = 1
    """Version 0.2: ranks that share one copy of the model."""

    @property
    def on(self) -> bool:
        """Return whether the batch keys follow from this section."""
        return self.enabled is True

    @property
    def batch(self) -> ElasticBatch | None:
        """Return the batch size and the data-parallel degrees; None where nothing fits, or numbers contradict each
        other."""
        largest, sizes = self.value_of("max_train_batch_size"), self.value_of("micro_batch_sizes")
        nodes = self.value_of("version") == 0.2
        per_node = self.value_of("num_gpus_per_node") if nodes else 1
        per_model = self.value_of("model_parallel_size") if nodes else 1
        if largest is None or sizes is None or per_node % per_model:
            return None
        return elastic_batch(
            largest,
            sizes,
            least_gpus=self.value_of("min_gpus"),
            most_gpus=self.value_of("max_gpus"),
            prefers_larger=self.value_of("prefer_larger_batch"),
            gpus_per_node=per_node,
            gpus_per_model=per_model,
        )

    @property
    def only_batch(self) -> ElasticBatch | None:
        """Return the batch that batch keys must agree with; None where they may say what they like."""
        return self.batch if self.on and not self.value_of("ignore_non_elastic_batch_info") else None

    @property
    def world_sizes(self) -> tuple[int, ...] | None:
        """Return the numbers of ranks that are allowed, ascending; None: all are."""
        batch = self.batch if self.on else None
        return batch and tuple(degree * self.value_of("model_parallel_size") for degree in batch.dp_degrees)

    def value_of(self, key: str) -> Any:
        """Return the value of a key; its default where that is open."""
        value = getattr(self, key)
        return type(self).model_fields[key].get_default() if value == AUTO else value


def solve(
    config: Config, given: Mapping[str, int | None], dp_degree: int, sources: Mapping[str, str]
) -> BatchTriple:
    """Return the batch keys on `dp_degree` data-parallel ranks.

    Args:
        given: what is written of them, or given by the run.
        sources: where, for the message.

    Raises:
        BatchError: that number of ranks is not allowed, or the given numbers contradict the section.
    """
    section, ranks = config.elasticity, config.pipeline.degree * config.tensor_parallel.degree
    if section.value_of("model_parallel_size") != ranks:
        what = f"{section.value_of('model_parallel_size')} contradicts the {ranks} ranks that share a copy of the model"
        raise BatchError(Problem(("elasticity", "model_parallel_size"), what, f"write {ranks}"))
    batch = section.batch
    assert batch is not None and section.micro_batch_sizes is not None  # conflicts.py has seen to it
    if dp_degree not in batch.dp_degrees:
        raise BatchError(refusal(section, dp_degree * ranks))
    micro = micro_batch(batch.train, section.micro_batch_sizes, dp_degree)
    triple = BatchTriple(batch.train, micro, batch.train // micro // dp_degree)
    for key, value in zip(BATCH_KEYS, triple, strict=True):
        if given.get(key) not in (None, value) and not section.value_of("ignore_non_elastic_batch_info"):
            what = f"{given[key]} ({sources.get(key, 'given')}) contradicts elasticity, which sets {value}"
            fix = 'leave it out, or write "ignore_non_elastic_batch_info": true in elasticity'
            raise BatchError(Problem((key,), what, fix))
    return triple


def refusal(section: ElasticityConfig, ranks: int) -> Problem:
    """Say why so many ranks are not allowed."""
    sizes = section.world_sizes or ()
    near = [*[size for size in sizes if size < ranks][-1:], *[size for size in sizes if size > ranks][:1]]
    what = f"{ranks} ranks are not allowed; these numbers are: {few(sizes)}"
    return Problem(("elasticity",), what, f"start {' or '.join(map(str, near))} ranks")


def few(numbers: tuple[int, ...]) -> str:
    """Write numbers one after the other, of many the first ones and the last."""
    if len(numbers) <= SHOWN:
        return ", ".join(map(str, numbers))
    shown = ", ".join(map(str, numbers[: SHOWN - 2]))
    return f"{shown}, ... {numbers[-1]}"


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
    """Return the batch size and its degrees; None where no number of GPUs within the bounds fits.

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
    """Return the largest micro batch with which the ranks take `train` sequences in whole microbatches; `dp_degree` is
    one of those that `elastic_batch` gave."""
    return max(size for size in micro_sizes if train // dp_degree % size == 0)


def _candidates(bound: int, micro_sizes: Sequence[int]) -> set[int]:
    bases = {*micro_sizes, math.lcm(*micro_sizes)}
    factors = {base: bisect_right(HIGHLY_COMPOSITE, bound // base) for base in bases if base <= bound}
    return {base * HIGHLY_COMPOSITE[index - 1] for base, index in factors.items()}


def _counts(size: int, micro_sizes: Sequence[int]) -> list[int]:
    """List every n for which `size` is micro batch x accumulation x n."""
    return sorted({n for micro in micro_sizes if size % micro == 0 for n in divisors(size // micro)})
