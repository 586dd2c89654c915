"""Estimates of alternatives to a run: all ZeRO stages and offload modes, and changes that make a run fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from launcher.config import Config, load
from launcher.errors import ConfigError, LauncherError
from launcher.estimate.answer import Estimate
from launcher.estimate.estimator import Estimator

ConfigChanges = Mapping[str, Any]
"""Dotted path of a key -> its new value; None removes the key."""

STAGE, PARAM, OPTIMIZER = (
    f"zero_optimization.{key}" for key in ("stage", "offload_param", "offload_optimizer")
)
MICRO, ACCUMULATION = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
CPU = {"device": "cpu"}
NVME = {"device": "nvme", "nvme_path": "/nvme"}
MODES: tuple[tuple[str, ConfigChanges], ...] = (
    *((f"stage {stage}", {STAGE: stage, PARAM: None, OPTIMIZER: None}) for stage in range(4)),
    *(
        (f"stage {stage}, optimizer on the host", {STAGE: stage, PARAM: None, OPTIMIZER: CPU})
        for stage in (1, 2, 3)
    ),
    ("stage 3, all on the host", {STAGE: 3, PARAM: CPU, OPTIMIZER: CPU}),
    ("stage 3, optimizer on NVMe", {STAGE: 3, PARAM: None, OPTIMIZER: NVME}),
    ("stage 3, all on NVMe", {STAGE: 3, PARAM: NVME, OPTIMIZER: NVME}),
)


@dataclass(frozen=True)
class Variant:
    """An alternative to a run.

    Args:
        name: description.
        ranks: see `Estimator.run`; empty if the variant is not possible.
        refused: why it is not possible.
    """

    name: str
    ranks: tuple[Estimate, ...] = ()
    refused: str = ""

    @property
    def peak(self) -> int:
        """Return the peak bytes on the device of the most loaded rank."""
        return max(one.peak for one in self.ranks)

    def fits(self, device: int) -> bool:
        return bool(self.ranks) and self.peak <= device


def edited(config: Config, edits: ConfigChanges) -> Config:
    """Return the configuration with other values of some keys.

    Raises:
        ConfigError: the keys do not fit each other.
    """
    tree = config.given()
    for path, value in edits.items():
        *sections, key = path.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        if value is None:
            inner.pop(key, None)
        else:
            inner[key] = value
    return load(tree)


def variant(
    estimator: Estimator, config: Config, name: str, edits: ConfigChanges, world: int, sequence: int | None
) -> Variant:
    """Return the estimate with other values of some keys."""
    try:
        return Variant(name, tuple(estimator.run(edited(config, edits), world, sequence)))
    except LauncherError as error:
        return Variant(name, refused=error.what)


def side_by_side(estimator: Estimator, config: Config, world: int, sequence: int | None) -> list[Variant]:
    """Return the variants for all ZeRO stages and offload modes."""
    return [variant(estimator, config, name, edits, world, sequence) for name, edits in MODES]


def advice(
    estimator: Estimator, config: Config, world: int, sequence: int | None, device: int
) -> tuple[list[str], Variant] | None:
    """Return changes to the JSON that make a run fit, and the resulting estimate; None if none are enough.

    Changes are added one by one in the order of their cost. Those that turn out to be unnecessary are then
    removed.

    Args:
        device: usable bytes of the device.
    """

    def tried(changes: list[tuple[str, ConfigChanges]]) -> Variant:
        edits = {path: value for _, one in changes for path, value in one.items()}
        return variant(estimator, config, "", edits, world, sequence)

    taken: list[tuple[str, ConfigChanges]] = []
    for change in _changes(config, world):
        found = tried([*taken, change])
        if found.ranks:
            taken.append(change)
        if found.fits(device):
            break
    else:
        return None
    for change in taken[:-1]:
        fewer = [one for one in taken if one is not change]
        if (less := tried(fewer)).fits(device):
            taken, found = fewer, less
    return [words for words, _ in taken], found


def _changes(config: Config, world: int) -> Iterator[tuple[str, ConfigChanges]]:
    """Yield (description, keys) of changes, cheapest first. Later ones override the keys of earlier ones."""
    try:
        batch = config.resolve(dp_degree=config.dp_degree(world))
        micro, steps = (int(str(getattr(batch, key))) for key in (MICRO, ACCUMULATION))
    except ConfigError:
        micro, steps = 1, 1
    while micro > 1 and micro % 2 == 0:
        micro, steps = micro // 2, steps * 2
        yield f'"{MICRO}": {micro}, "{ACCUMULATION}": {steps}', {MICRO: micro, ACCUMULATION: steps}
    if not config.tiled_loss:
        yield '"tiled_loss": true', {"tiled_loss": True}
    if config.activation_checkpointing is None:
        yield '"activation_checkpointing": {}', {"activation_checkpointing": {}}
    zero = config.zero_optimization
    now = int(zero.stage) if isinstance(zero.stage, int) else 0
    for stage in range(now + 1, 4):
        yield f'"{STAGE}": {stage}', {STAGE: stage}
    if zero.offload_optimizer is None or zero.offload_optimizer.device == "none":
        yield f'"{OPTIMIZER}.device": "cpu"', {OPTIMIZER: CPU}
    if zero.offload_param is None or zero.offload_param.device == "none":
        yield f'"{PARAM}.device": "cpu"', {PARAM: CPU}
