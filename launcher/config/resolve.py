"""Removing every "auto" from a Config, and solving the batch equation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from launcher.config import elasticity
from launcher.config.batch import ACCUMULATION, BATCH_KEYS, BatchError, solve
from launcher.config.check import examine
from launcher.config.problems import ConfigProblems, Path, Problem, dotted
from launcher.config.schema import implemented_paths
from launcher.config.section import AUTO, Section
from launcher.errors import ConfigError

if TYPE_CHECKING:
    from launcher.config.root import Config


class ResolvedAuto(NamedTuple):
    """What an "auto", or a batch key that was left out, became."""

    path: str
    value: Any
    why: str


def autos_of_hidden_size(hidden_size: int) -> dict[str, int]:
    """Values for `resolve(auto=...)` that follow from the model's width, as in Hugging Face's Trainer."""
    return {
        "zero_optimization.reduce_bucket_size": hidden_size * hidden_size,
        "zero_optimization.stage3_prefetch_bucket_size": hidden_size * hidden_size * 9 // 10,
        "zero_optimization.stage3_param_persistence_threshold": 10 * hidden_size,
    }


def resolved(config: Config, dp_degree: int, auto: Mapping[str, Any]) -> Config:
    """See `Config.resolve`."""
    if isinstance(dp_degree, bool) or not isinstance(dp_degree, int) or dp_degree < 1:
        raise ConfigError(f"dp_degree must be a whole number from 1, not {dp_degree!r}")
    strange = sorted(set(auto) - set(implemented_paths(type(config))))
    if strange:
        raise ConfigError(f"values are given for keys that do not exist: {', '.join(strange)}")
    tree, found, problems = config.given(), [*config.resolved_autos], []
    for path, section in _autos(config, ()):
        if len(path) == 1 and path[0] in BATCH_KEYS:
            continue
        answer = _answer(config, path, section, auto, tree)
        if isinstance(answer, Problem):
            problems.append(answer)
        else:
            found.append(answer)
            _put(tree, path, answer.value)
    document = config._document
    try:
        found += _batch(config, tree, dp_degree, auto)
    except BatchError as error:
        problems.append(error.problem)
    if problems:
        raise ConfigProblems(document.name, problems, document.described)
    found_now = examine(type(config), replace(document, tree=tree, problems=[], conversions=[]))
    copy = found_now.required()
    copy._document, copy._notes = document, tuple(dict.fromkeys((*config.notes, *found_now.notes)))
    copy._resolved_autos = tuple(found)
    return copy


def _autos(section: Section, path: Path) -> list[tuple[Path, Section]]:
    """Every key that says "auto", with its section."""
    found = []
    for key in type(section).model_fields:
        value = getattr(section, key)
        if isinstance(value, Section):
            found += _autos(value, (*path, key))
        elif value == AUTO and isinstance(value, str):
            found.append(((*path, key), section))
    return found


def _answer(
    config: Config, path: Path, section: Section, auto: Mapping[str, Any], tree: Mapping[str, Any]
) -> ResolvedAuto | Problem:
    """The value of one "auto": what the caller gives, else the default of its key.

    `tree` is resolved up to this key; optimizer comes before scheduler.
    """
    name, key = dotted(path), str(path[-1])
    if auto.get(name) is not None:
        return ResolvedAuto(name, auto[name], "given by the run")
    if name == "scheduler.params.warmup_max_lr" and config.optimizer is not None:
        return ResolvedAuto(name, tree["optimizer"]["params"]["lr"], "the optimizer's learning rate")
    if key in section.auto_needs_value or type(section).model_fields[key].is_required():
        return Problem(path, '"auto" has no value: nothing in this run says it', "write the value")
    default = defaults_at(config, path).get(key, type(section).model_fields[key].get_default())
    return ResolvedAuto(name, default, "the key's default")


def defaults_at(config: Config, path: Path) -> Mapping[str, Any]:
    """Defaults that depend on the section around (an optimizer's type)."""
    if len(path) < 2:
        return {}
    outer: Section = config
    for part in path[:-2]:
        outer = getattr(outer, str(part))
    return type(outer).defaults_of(str(path[-2]), outer.given())


def _put(tree: dict[str, Any], path: Path, value: Any) -> None:
    for part in path[:-1]:
        tree = tree[str(part)]
    tree[str(path[-1])] = value


def _batch(
    config: Config, tree: dict[str, Any], dp_degree: int, auto: Mapping[str, Any]
) -> list[ResolvedAuto]:
    """Writes the solved triple into the tree and tells what was not written by the user."""
    written = {key: getattr(config, key) for key in BATCH_KEYS}
    by_flag = {auto.path: auto.why for auto in config.resolved_autos}
    given: dict[str, int | None] = {}
    sources: dict[str, str] = {}
    for key, value in written.items():
        open_ = value is None or value == AUTO
        given[key] = auto.get(key) if open_ else value
        sources[key] = "given by the run" if open_ else by_flag.get(key) or config._document.where((key,))
    elastic = config.elasticity.on
    arguments = given, dp_degree, sources
    triple = elasticity.solve(config, *arguments) if elastic else solve(*arguments)
    found = []
    for key, value in zip(BATCH_KEYS, triple, strict=True):
        tree[key] = value
        if written[key] != value:
            known = given[key] is not None
            default = key == ACCUMULATION and value == 1 and sum(v is not None for v in given.values()) == 1
            why = sources[key] if known else "the key's default" if default else "from the batch equation"
            found.append(ResolvedAuto(key, value, "from elasticity" if elastic else why))
    return found
