"""How the ranks of a run are divided: pipeline stages x data-parallel ranks x tensor-parallel ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from launcher.errors import ConfigError

if TYPE_CHECKING:
    from launcher.config.root import Config

STAGES, TENSOR = "pipeline.stages", "tensor_parallel.autotp_size"


def dp_degree(config: Config, ranks: int) -> int:
    """See `Config.dp_degree`."""
    degrees = {STAGES: config.pipeline.degree, TENSOR: config.tensor_parallel.degree}
    share = math.prod(degrees.values())
    if ranks % share == 0:
        return ranks // share
    written = {key: degree for key, degree in degrees.items() if degree > 1}
    named = " x ".join(f"{key} {degree}" for key, degree in written.items())
    ways = [f"write {way}" for way in _ways_out(written, ranks)]
    equation = (
        f"{STAGES} {degrees[STAGES]} x data-parallel ranks x {TENSOR} {degrees[TENSOR]} = {ranks} ranks"
    )
    raise ConfigError(
        f"{named} does not divide the number of ranks, {ranks}: {equation}",
        where=config.where(next(iter(written))),
        fix=", or ".join([*ways, f"start {share} ranks or a multiple of that"]),
    )


def with_stages(config: Config, stages: int) -> Config:
    """See `Config.with_stages`."""
    if config.pipeline.stages not in (None, "auto", stages):
        raise ConfigError(
            f"{STAGES} {config.pipeline.stages} contradicts the model, which is cut into {stages} stages",
            where=config.where(STAGES),
            fix=f'write "stages": {stages}, or leave it out',
        )
    return config.model_copy(update={"pipeline": config.pipeline.model_copy(update={"stages": stages})})


def places(pp: int, dp: int, tp: int) -> list[str]:
    """What each rank is: "stage 1, dp 0, tp 1", in axes that have several ranks. Nothing where that is dp alone."""
    if pp == tp == 1:
        return []
    sizes = {"stage": pp, "dp": dp, "tp": tp}
    return [
        ", ".join(f"{name} {at}" for (name, size), at in zip(sizes.items(), where, strict=True) if size > 1)
        for where in itertools.product(*map(range, sizes.values()))
    ]


def mesh_lines(degrees: Mapping[str, int], host: str) -> list[str]:
    """Which rank is what, for people: nothing for dp alone, a line for another axis alone, else a table.

    Args:
        degrees: of the axes, outermost first.
    """
    several = {name: degree for name, degree in degrees.items() if degree > 1}
    if not several.keys() - {"dp"}:
        return []
    title = f"{' x '.join(f'{name} {degree}' for name, degree in several.items())} on {host}"
    pp, dp, tp = (degrees.get(name, 1) for name in ("pp", "dp", "tp"))
    if len(several) == 1:
        return [f"{title}: ranks {'are the stages' if pp > 1 else 'share every layer'}"]
    cells = [["", *(f"dp {i}" for i in range(dp))]]
    for stage in range(pp):
        firsts = [(stage * dp + i) * tp for i in range(dp)]
        ranks = [" ".join(map(str, range(first, first + tp))) for first in firsts]
        cells.append([f"stage {stage}" if pp > 1 else "ranks", *ranks])
    if dp == 1:
        cells.pop(0)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rows = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in cells)
    return [title, *(row.rstrip() for row in rows)]


def _ways_out(written: dict[str, int], ranks: int) -> list[str]:
    """For each degree the sizes that fit while the others stay."""
    ways = []
    for key in written:
        others = math.prod(degree for other, degree in written.items() if other != key)
        sizes = [size for size in range(1, ranks // others + 1) if ranks % (others * size) == 0]
        name = f"{key.rpartition('.')[2]} " if len(written) > 1 else ""
        ways += [f"{name}{_either(sizes)}"] if sizes else []
    return ways


def _either(numbers: list[int]) -> str:
    """ "1, 2 or 4"."""
    texts = [str(number) for number in numbers]
    return " or ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))
