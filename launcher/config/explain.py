"""What every "auto" and every default of a configuration became."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from launcher.config.batch import BATCH_KEYS
from launcher.config.problems import ConfigProblems, Path, dotted
from launcher.config.resolve import ResolvedAuto, defaults_at
from launcher.config.root import Config
from launcher.config.schema import keys_written
from launcher.config.section import AUTO, Section

OF_HIDDEN_SIZE = {
    "zero_optimization.reduce_bucket_size": "hidden size x hidden size",
    "zero_optimization.stage3_prefetch_bucket_size": "0.9 x hidden size x hidden size",
    "zero_optimization.stage3_param_persistence_threshold": "10 x hidden size",
}


class Explained(NamedTuple):
    """One key that has no value of its own in the file.

    Attributes:
        path: dotted.
        value: what it became, as text.
        why: "the default", or where the value comes from.
        auto: the file says "auto".
    """

    path: str
    value: str
    why: str
    auto: bool


def explain(config: Config, tree: Mapping[str, Any], dp_degree: int | None) -> list[Explained]:
    """Every key that says "auto" or is left out, in the order of the schema.

    Args:
        config: not resolved.
        tree: the document it was made of, converted.
        dp_degree: data-parallel ranks, which solve the batch equation; None: it is left open.
    """
    written = keys_written(Config, tree)
    return list(_batch(config, dp_degree)) + list(_section(config, config, (), written, config.to_dict()))


def solved_batch(config: Config, dp_degree: int) -> tuple[ResolvedAuto, ...]:
    """What the batch equation gives on so many ranks, whatever the run may say of rates and schedules.

    Raises:
        ConfigProblems: it does not hold.
    """
    return (
        config.model_copy(update={"optimizer": None, "scheduler": None})
        .resolve(dp_degree=dp_degree)
        .resolved_autos
    )


def _batch(config: Config, dp_degree: int | None) -> Iterator[Explained]:
    solved: dict[str, tuple[Any, str]] = {}
    if dp_degree is not None:
        try:
            solved = {entry.path: (entry.value, entry.why) for entry in solved_batch(config, dp_degree)}
        except ConfigProblems:
            solved = {}
    for key in BATCH_KEYS:
        value = getattr(config, key)
        if value is None or value == AUTO:
            open_ = "the run's flags, or the batch equation: --num-gpus N solves it"
            answer, why = solved.get(key, ("open", open_))
            yield Explained(key, str(answer), why, value == AUTO)


def _section(
    root: Config, section: Section, path: Path, written: set[Path], shown: Mapping[str, Any]
) -> Iterator[Explained]:
    """`shown` has the keys of the section that mean something here (an optimizer has only its own)."""
    for key in type(section).model_fields:
        here = (*path, key)
        value = getattr(section, key)
        if here[0] in BATCH_KEYS or key not in shown:
            continue
        if isinstance(value, Section):
            if here not in written and getattr(value, "enabled", None) is False:
                yield Explained(dotted(here), "off", "the default", False)
            else:
                yield from _section(root, value, here, written, shown[key])
        elif isinstance(value, str) and value == AUTO:
            yield _auto(root, section, here)
        elif here not in written:
            yield Explained(dotted(here), _json(value), "the default", False)


def _auto(root: Config, section: Section, path: Path) -> Explained:
    name, key = dotted(path), str(path[-1])
    if name in OF_HIDDEN_SIZE:
        return Explained(
            name, OF_HIDDEN_SIZE[name], "of the model; Hugging Face's Trainer does the same", True
        )
    if name == "scheduler.params.warmup_max_lr" and root.optimizer is not None:
        return Explained(name, _json(root.optimizer.params.lr), "the optimizer's learning rate", True)
    field = type(section).model_fields[key]
    if key in section.auto_needs_value or field.is_required():
        return Explained(name, "open", "the run must give it: there is no safe default", True)
    default = defaults_at(root, path).get(key, field.get_default())
    return Explained(name, _json(default), "the default, where the run gives no other", True)


def _json(value: Any) -> str:
    """As it stands in the file, texts without their quotes."""
    return value if isinstance(value, str) else json.dumps(value)
