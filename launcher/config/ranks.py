"""How the ranks of a run are divided: pipeline stages x data-parallel ranks x tensor-parallel ranks."""

from __future__ import annotations

import math
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
