"""The parallel degrees and batch sizes of a run.

The number of ranks is pipeline stages x data-parallel x context-parallel x tensor-parallel degree;
train_batch_size is micro batch x accumulation x data-parallel degree.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple

from launcher.config.problems import Problem
from launcher.errors import ConfigError

if TYPE_CHECKING:
    from launcher.config.root import Config

TRAIN, MICRO, ACCUMULATION = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
MOST_TRIED = 10**6
BATCH_KEYS = (TRAIN, MICRO, ACCUMULATION)
STAGES, TENSOR = "pipeline.stages", "tensor_parallel.autotp_size"
CONTEXT, EXPERTS = "sequence_parallel_size", "expert_parallel"


def batch_without_ranks(config: Config) -> tuple[list[str], int] | None:
    """Return (keys, their product) if train_batch_size is not a multiple of that product, else None.

    The batch equation then has no solution for any number of ranks.
    """
    written = {key: getattr(config, key) for key in BATCH_KEYS}
    counts = {key: value for key, value in written.items() if isinstance(value, int)}
    train, unit = counts.pop(TRAIN, 0), math.prod(counts.values())
    return None if config.elasticity.on or train % unit == 0 else ([*counts], unit)


def dp_degree(config: Config, ranks: int) -> int:
    """See `Config.dp_degree`."""
    degrees = {STAGES: config.pipeline.degree, TENSOR: config.tensor_parallel.degree}
    if config.cp_degree > 1:
        degrees[CONTEXT] = config.cp_degree
    share = math.prod(degrees.values())
    if ranks % share == 0:
        check_experts(config, ranks // share)
        return ranks // share
    written = {key: degree for key, degree in degrees.items() if degree > 1}
    named = " x ".join(f"{key} {degree}" for key, degree in written.items())
    ways = [f"write {way}" for way in _degrees_that_fit(written, ranks)]
    first, *others = (f"{key} {degree}" for key, degree in degrees.items())
    equation = f"{' x '.join([first, 'data-parallel ranks', *others])} = {ranks} ranks"
    raise ConfigError(
        f"{named} does not divide the number of ranks, {ranks}: {equation}",
        where=config.where(next(iter(written))),
        fix=", or ".join([*ways, f"start {share} ranks or a multiple of that"]),
    )


def check_experts(config: Config, dp: int) -> None:
    """Check that the expert-parallel degree divides the product of the dp, cp and tp degrees.

    Args:
        dp: data-parallel ranks.

    Raises:
        ConfigError: it does not.
    """
    section, ranks = config.expert_parallel, dp * config.cp_degree * config.tensor_parallel.degree
    if ranks % section.degree:
        key = f"{EXPERTS}.{'size' if section.size == section.degree else 'autoep_size'}"
        of_stage = " of each pipeline stage" if config.pipeline.degree > 1 else ""
        said = key if config._document.holds((EXPERTS,)) else "ep_size of the expert layers"
        raise ConfigError(
            f"{said} is {section.degree}, which does not divide the {ranks} ranks{of_stage}",
            where=config.where(key),
            fix=f"write {_either(sorted(set(divisors(ranks))))}",
        )


def with_stages(config: Config, stages: int) -> Config:
    """See `Config.with_stages`."""
    if config.pipeline.stages not in (None, "auto", stages):
        raise ConfigError(
            f"{STAGES} {config.pipeline.stages} contradicts the model, which is split into {stages} stages",
            where=config.where(STAGES),
            fix=f'write "stages": {stages}, or remove it',
        )
    return config.model_copy(update={"pipeline": config.pipeline.model_copy(update={"stages": stages})})


def with_shared_sequences(config: Config, ranks: int, by: str) -> Config:
    """Return a copy with the context-parallel degree `ranks`, which a script sets.

    Args:
        by: the argument that sets it.

    Raises:
        ConfigError: the JSON sets a different number.
    """
    if config.cp_degree not in (1, ranks):
        raise ConfigError(
            f"the context-parallel degree is {config.cp_degree}, but {by} of initialize() has {ranks} ranks",
            where=config.where(CONTEXT),
            fix=f'write "{CONTEXT}": {ranks}, or remove it',
        )
    return config.model_copy(update={CONTEXT: ranks})


def with_spread_experts(config: Config, sizes: Collection[int]) -> Config:
    """Return a copy with the expert-parallel degree that the layers of a model set.

    Args:
        sizes: the distinct degrees of the layers, each more than 1.

    Raises:
        ConfigError: they differ, or the JSON sets a different number.
    """
    said = config.expert_parallel.degree
    if len(sizes) > 1 or (said > 1 and said not in sizes):
        layers = ", ".join(map(str, sorted(sizes)))
        others = f", and the JSON has degree {said}" if said > 1 else ""
        raise ConfigError(
            f"expert layers have ep_size {layers}{others}: all must have the same expert-parallel degree",
            where=config.where(f"{EXPERTS}.size") if said > 1 else "ep_size",
            fix="use the same degree everywhere; layers with ep_size 1 keep all of their experts on every rank",
        )
    (size,) = sizes
    section = config.expert_parallel.model_copy(update={"size": size})
    return config.model_copy(update={EXPERTS: section})


_WHAT = {"pp": "one stage per rank", "tp": "ranks share every layer", "cp": "ranks share every sequence"}


def places(pp: int, dp: int, tp: int, cp: int = 1) -> list[str]:
    """Describe each rank's position in the mesh, such as "stage 1, dp 0, tp 1".

    Axes of size 1 are omitted; the list is empty for dp alone.
    """
    if pp == tp == cp == 1:
        return []
    sizes = {"stage": pp, "dp": dp, "cp": cp, "tp": tp}
    return [
        ", ".join(f"{name} {at}" for (name, size), at in zip(sizes.items(), where, strict=True) if size > 1)
        for where in itertools.product(*map(range, sizes.values()))
    ]


def mesh_lines(degrees: Mapping[str, int], host: str) -> list[str]:
    """Describe the mesh to the user: no lines for dp alone, one line for another axis alone, else a table.

    Args:
        degrees: degrees of the axes, outermost first.
    """
    several = {name: degree for name, degree in degrees.items() if degree > 1}
    if not several.keys() - {"dp"}:
        return []
    title = f"{' x '.join(f'{name} {degree}' for name, degree in several.items())} on {host}"
    pp, dp, cp, tp = (degrees.get(name, 1) for name in ("pp", "dp", "cp", "tp"))
    groups = [f"dp {i}" + (f", cp {j}" if cp > 1 else "") for i in range(dp) for j in range(cp)]
    if len(several) == 1:
        return [f"{title}: {_WHAT[next(iter(several))]}"]
    cells = [["", *groups]]
    for stage in range(pp):
        firsts = [(stage * len(groups) + i) * tp for i in range(len(groups))]
        ranks = [" ".join(map(str, range(first, first + tp))) for first in firsts]
        cells.append([f"stage {stage}" if pp > 1 else "ranks", *ranks])
    if len(groups) == 1:
        cells.pop(0)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rows = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in cells)
    return [title, *(row.rstrip() for row in rows)]


def _degrees_that_fit(written: dict[str, int], ranks: int) -> list[str]:
    """Return, for each degree, the sizes that fit if the others stay."""
    ways = []
    for key in written:
        others = math.prod(degree for other, degree in written.items() if other != key)
        sizes = [size for size in range(1, ranks // others + 1) if ranks % (others * size) == 0]
        name = f"{key.rpartition('.')[2]} " if len(written) > 1 else ""
        ways += [f"{name}{_either(sizes)}"] if sizes else []
    return ways


def _either(numbers: list[int]) -> str:
    """Format numbers as "1, 2 or 4"."""
    texts = [str(number) for number in numbers]
    return " or ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))


class BatchTriple(NamedTuple):
    """Sequences per step over all ranks, sequences per rank and forward pass, forward passes per step."""

    train: int
    micro: int
    accumulation: int


class BatchError(Exception):
    """Raised if the batch equation has no integer solution; `problem` explains it to the user."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(problem.what)


def solve(
    given: Mapping[str, int | None], dp_degree: int, sources: Mapping[str, str] | None = None
) -> BatchTriple:
    """Compute the missing ones of the three batch keys, as DeepSpeed does.

    Args:
        given: the three keys of BATCH_KEYS; None or absent means unknown.
        dp_degree: data-parallel ranks, at least 1.
        sources: where each given number was written, for the message.

    Raises:
        BatchError: too few keys are given, or the equation has no integer solution.
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
    reason = f" from {ACCUMULATION} {accumulation} alone" if accumulation else ""
    return Problem((MICRO,), f"the micro batch size cannot be determined{reason}", f"set {MICRO} or {TRAIN}")


def _no_solution(given: Mapping[str, int | None], dp_degree: int, sources: Mapping[str, str]) -> Problem:
    """Return a problem that shows the equation with its numbers and the nearest numbers that solve it."""
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
    return Problem((TRAIN,), what, "; or ".join(_batches_that_fit(train, micro, accumulation, dp_degree)))


def _batches_that_fit(train: int, micro: int | None, accumulation: int | None, dp_degree: int) -> list[str]:
    """Return changes of a single key that solve the equation, the nearest values first."""
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
    """Return the divisors of a positive integer, unordered; a square root is listed twice.

    For a huge number, some divisors are omitted.
    """
    small = [d for d in range(1, min(math.isqrt(number), MOST_TRIED) + 1) if number % d == 0]
    return small + [number // d for d in small]
