"""`elasticity`: a batch size that works for many world sizes, so that a run can shrink and grow.

A batch of B sequences can be trained on n ranks if B is micro batch x accumulation x n for one of the allowed
micro batches, that is, if n divides B / micro batch. Highly composite numbers have more divisors than any
smaller number, so the candidates for B are the micro batches and their least common multiple, each times the
largest highly composite number that stays within the bound. The candidate with the most world sizes is
chosen.
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
"""Maximum length of a list in a message."""


def _version(value: Any) -> Any:
    if isinstance(value, bool) or value not in (0.1, 0.2):
        raise complaint(f"must be 0.1 or 0.2, not {show(value)}", "write 0.2, or remove it")
    return float(value)


class ElasticityConfig(Section):
    """Elastic training: a batch size that works for many world sizes.

    If enabled, train_batch_size, the micro batch and the accumulation are derived from this section and from
    the number of ranks; a step trains on the same sequences on every allowed number. The batch size is at
    most `max_train_batch_size`, and divides into whole microbatches of one of `micro_batch_sizes` on as many
    numbers of GPUs as possible. These are the allowed numbers of GPUs, which `launch check --num-gpus N`
    prints; others are refused. With `--min_nodes`, a restart continues on the largest allowed number of the
    remaining ranks.
    """

    without_effect: ClassVar[dict[str, str]] = {
        "min_time": "the number of ranks changes only at a restart, and runs are not restarted for that purpose",
    }
    differs: ClassVar[dict[str, str]] = {
        "enabled": "DeepSpeed supported it until 0.19.6; 0.19.8 rejects the section",
        "version": "0.2 also rejects numbers of ranks that are not allowed; DeepSpeed uses another batch size for them",
        "model_parallel_size": "must be pipeline stages x tensor-parallel degree of this file",
    }

    enabled: bool = False
    """Derive the batch keys from this section."""

    max_train_batch_size: Count | None = None
    """Maximum number of sequences per optimizer step. Required."""

    micro_batch_sizes: WholeNumbers | None = None
    """Allowed numbers of sequences per rank and forward pass; the largest that fits is used. Required."""

    min_gpus: Count = 1
    """Minimum number of GPUs; version 0.2 rounds down to whole nodes."""

    max_gpus: Count = 10000
    """Maximum number of GPUs; version 0.2 rounds down to whole nodes."""

    min_time: WholeNumber = 0
    """Minutes that a scheduler waits before it changes the number of GPUs."""

    version: Annotated[float, BeforeValidator(_version)] = 0.2
    """0.1 counts GPUs; 0.2 counts nodes of `num_gpus_per_node` GPUs and supports `model_parallel_size`."""

    ignore_non_elastic_batch_info: bool = False
    """Override batch keys that are set in the JSON or by the run. False: they are an error."""

    prefer_larger_batch: bool = True
    """Of two batch sizes that fit equally many numbers of GPUs, choose the larger."""

    num_gpus_per_node: Count = 1
    """Version 0.2: a run grows and shrinks by whole nodes of this many GPUs."""

    model_parallel_size: Count = 1
    """Version 0.2: ranks that share one copy of the model."""

    @property
    def on(self) -> bool:
        """Return whether the batch keys are derived from this section."""
        return self.enabled is True

    @property
    def batch(self) -> ElasticBatch | None:
        """Return the batch size and its data-parallel degrees; None if nothing fits or numbers conflict."""
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
        """Return the batch that the batch keys must agree with; None if they are unconstrained."""
        return self.batch if self.on and not self.value_of("ignore_non_elastic_batch_info") else None

    @property
    def world_sizes(self) -> tuple[int, ...] | None:
        """Return the allowed world sizes, ascending; None if all are allowed."""
        batch = self.batch if self.on else None
        return batch and tuple(degree * self.value_of("model_parallel_size") for degree in batch.dp_degrees)

    def value_of(self, key: str) -> Any:
        """Return the value of a key; its default if it is "auto"."""
        value = getattr(self, key)
        return type(self).model_fields[key].get_default() if value == AUTO else value


def solve(
    config: Config, given: Mapping[str, int | None], dp_degree: int, sources: Mapping[str, str]
) -> BatchTriple:
    """Return the batch keys for `dp_degree` data-parallel ranks.

    Args:
        given: the batch keys that are set in the JSON or by the run.
        sources: where each was set, for the message.

    Raises:
        BatchError: that number of ranks is not allowed, or the given numbers contradict the section.
    """
    section, ranks = config.elasticity, config.pipeline.degree * config.tensor_parallel.degree
    if section.value_of("model_parallel_size") != ranks:
        what = f"{section.value_of('model_parallel_size')} is not pipeline stages x tensor-parallel degree, {ranks}"
        raise BatchError(Problem(("elasticity", "model_parallel_size"), what, f"write {ranks}"))
    batch = section.batch
    assert batch is not None and section.micro_batch_sizes is not None  # checked in section_conflicts.py
    if dp_degree not in batch.dp_degrees:
        raise BatchError(refusal(section, dp_degree * ranks))
    micro = micro_batch(batch.train, section.micro_batch_sizes, dp_degree)
    triple = BatchTriple(batch.train, micro, batch.train // micro // dp_degree)
    for key, value in zip(BATCH_KEYS, triple, strict=True):
        if given.get(key) not in (None, value) and not section.value_of("ignore_non_elastic_batch_info"):
            what = f"{given[key]} ({sources.get(key, 'given')}) contradicts elasticity, which sets {value}"
            fix = 'remove it, or write "ignore_non_elastic_batch_info": true in elasticity'
            raise BatchError(Problem((key,), what, fix))
    return triple


def refusal(section: ElasticityConfig, ranks: int) -> Problem:
    """Return the problem that `ranks` ranks are not allowed."""
    sizes = section.world_sizes or ()
    near = [*[size for size in sizes if size < ranks][-1:], *[size for size in sizes if size > ranks][:1]]
    what = f"{ranks} ranks are not allowed; allowed numbers: {few(sizes)}"
    return Problem(("elasticity",), what, f"start {' or '.join(map(str, near))} ranks")


def few(numbers: tuple[int, ...]) -> str:
    """Format a list of numbers; a long list is shortened to its first ones and the last."""
    if len(numbers) <= SHOWN:
        return ", ".join(map(str, numbers))
    shown = ", ".join(map(str, numbers[: SHOWN - 2]))
    return f"{shown}, ... {numbers[-1]}"


HIGHLY_COMPOSITE = (
    *(1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080),
    *(15120, 20160, 25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640),
    *(498960, 554400, 665280, 720720),
)
"""OEIS A002182, as far as DeepSpeed uses it: larger factors would result in another batch size."""


class ElasticBatch(NamedTuple):
    """Sequences per optimizer step, and the data-parallel degrees that fit, ascending."""

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
    """Return the batch size and its degrees; None if no number of GPUs within the bounds fits.

    Args:
        largest: maximum number of sequences per step.
        micro_sizes: allowed micro batches, each at least 1.
        least_gpus, most_gpus: bounds on the number of GPUs; rounded down to whole nodes.
        prefers_larger: whether to choose the larger of two batch sizes that fit equally many numbers of GPUs.
        gpus_per_node: GPUs per node; a run grows and shrinks by whole nodes.
        gpus_per_model: pipeline stages x tensor-parallel ranks; divides `gpus_per_node`.
    """
    replicas = gpus_per_node // gpus_per_model  # model replicas per node
    bound = largest // replicas  # sequences per step for one replica per node
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
    """Return the largest micro batch that divides each rank's share of `train` sequences.

    `dp_degree` is one of the degrees that `elastic_batch` returned.
    """
    return max(size for size in micro_sizes if train // dp_degree % size == 0)


def _candidates(bound: int, micro_sizes: Sequence[int]) -> set[int]:
    bases = {*micro_sizes, math.lcm(*micro_sizes)}
    factors = {base: bisect_right(HIGHLY_COMPOSITE, bound // base) for base in bases if base <= bound}
    return {base * HIGHLY_COMPOSITE[index - 1] for base, index in factors.items()}


def _counts(size: int, micro_sizes: Sequence[int]) -> list[int]:
    """Return every n for which `size` is micro batch x accumulation x n."""
    return sorted({n for micro in micro_sizes if size % micro == 0 for n in divisors(size // micro)})
