"""The batch equation: train_batch_size is micro batch x accumulation x data-parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from launcher.config.problems import Problem

TRAIN, MICRO, ACCUMULATION = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
MOST_TRIED = 10**6
BATCH_KEYS = (TRAIN, MICRO, ACCUMULATION)


class BatchTriple(NamedTuple):
    """Sequences per optimizer step of all ranks, per rank and forward pass; forward passes per step."""

    train: int
    micro: int
    accumulation: int


class BatchError(Exception):
    """No whole numbers solve the equation; `problem` says it for people."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(problem.what)


def solve(
    given: Mapping[str, int | None], dp_degree: int, sources: Mapping[str, str] | None = None
) -> BatchTriple:
    """Fills in what is missing of the three keys, as DeepSpeed does.

    Args:
        given: the three keys of BATCH_KEYS; None or absent is unknown.
        dp_degree: data-parallel ranks, at least 1.
        sources: where each given number was written, for the message.

    Raises:
        BatchError: too little is given, or the equation has no whole solution.
    """
    train, micro, accumulation = (given.get(key) for key in BATCH_KEYS)
    if train is None and micro is None:
        raise BatchError(_too_little(accumulation))
    if train is None:
        assert micro is not None
        accumulation = accumulation or 1
        return BatchTriple(micro * accumulation * dp_degree, micro, accumulation)
    if micro is None:
        accumulation = accumulation or 1
        micro = _divide(train, accumulation * dp_degree)
    elif accumulation is None:
        accumulation = _divide(train, micro * dp_degree)
    if micro and accumulation and train == micro * accumulation * dp_degree:
        return BatchTriple(train, micro, accumulation)
    raise BatchError(_no_solution(given, dp_degree, sources or {}))


def _divide(train: int, parts: int) -> int | None:
    return train // parts if train % parts == 0 else None


def _too_little(accumulation: int | None) -> Problem:
    alone = "alone does not say" if accumulation else "is not enough to know"
    subject = f"{ACCUMULATION} {accumulation}" if accumulation else "leaving it out"
    return Problem(
        (MICRO,),
        f"{subject} {alone} how many sequences a rank takes at a time",
        f"give {MICRO}, or {TRAIN}",
    )


def _no_solution(given: Mapping[str, int | None], dp_degree: int, sources: Mapping[str, str]) -> Problem:
    """Names the equation with its numbers, and the nearest numbers that solve it."""
    terms = []
    for key in BATCH_KEYS:
        value = given.get(key)
        source = f" ({sources[key]})" if value is not None and key in sources else ""
        terms.append(f"{key} {'?' if value is None else value}{source}")
    train, micro, accumulation = (given.get(key) for key in BATCH_KEYS)
    assert train is not None
    parts = (micro or 1) * (accumulation or 1) * dp_degree
    product = f" = {parts}" if micro and accumulation else ""
    what = f"{terms[0]} must equal {terms[1]} x {terms[2]} x data-parallel ranks {dp_degree}{product}"
    return Problem((TRAIN,), what, "; or ".join(_ways_out(train, micro, accumulation, dp_degree)))


def _ways_out(train: int, micro: int | None, accumulation: int | None, dp_degree: int) -> list[str]:
    """Changes of one key that make the equation hold, the nearest values first."""
    parts = (micro or 1) * (accumulation or 1) * dp_degree
    if micro and accumulation:
        ways = [f"{TRAIN} {parts}"]
        for key, other in ((ACCUMULATION, micro), (MICRO, accumulation)):
            quotient = _divide(train, other * dp_degree)
            ways += [f"{key} {quotient}"] if quotient else []
        ranks = _divide(train, micro * accumulation)
        return ways + ([f"run on {ranks} data-parallel ranks"] if ranks else [])
    below, above = train // parts * parts, -(-train // parts) * parts
    sizes = [size for size in (below, above) if size]
    sizes.sort(key=lambda size: abs(size - train))
    ways = [f"{TRAIN} " + " or ".join(map(str, sizes))]
    if micro or accumulation:
        key, written = (MICRO, micro) if micro else (ACCUMULATION, accumulation)
        share, rest = divmod(train, dp_degree)
        if rest == 0 and written:
            fitting = min((d for d in divisors(share)), key=lambda d: (abs(d - written), d))
            ways.append(f"{key} {fitting}")
    return ways


def divisors(number: int) -> list[int]:
    """Of a whole number from 1, in no order; a root counts twice. Of a huge one some are left out."""
    small = [d for d in range(1, min(math.isqrt(number), MOST_TRIED) + 1) if number % d == 0]
    return small + [number // d for d in small]
