"""Fills in open values: `complete` from a recipe's flags, `resolved` once ranks and model are known.

`complete` adds the recipe's optimizer and schedule if the JSON has none. `resolved` replaces every "auto" and
solves the batch equation.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from launcher.config import elasticity
from launcher.config.check import examine
from launcher.config.optimizer import TYPES
from launcher.config.problems import ConfigProblems, Note, Path, Problem, dotted, show
from launcher.config.ranks import ACCUMULATION, BATCH_KEYS, MICRO, TRAIN, BatchError, divisors, solve
from launcher.config.schema import implemented_paths
from launcher.config.section import AUTO, Section
from launcher.errors import ConfigError

if TYPE_CHECKING:
    from launcher.config.root import Config


class ResolvedAuto(NamedTuple):
    """The resolved value of an "auto" or of a batch key that is not set."""

    path: str
    value: Any
    why: str


def autos_of_hidden_size(hidden_size: int) -> dict[str, int]:
    """Return values for `resolve(auto=...)` that follow from the model's width, as in Hugging Face's Trainer."""
    return {
        "zero_optimization.reduce_bucket_size": hidden_size * hidden_size,
        "zero_optimization.stage3_prefetch_bucket_size": hidden_size * hidden_size * 9 // 10,
        "zero_optimization.stage3_param_persistence_threshold": 10 * hidden_size,
    }


def resolved(config: Config, dp_degree: int, auto: Mapping[str, Any]) -> Config:
    """See `Config.resolve`."""
    if isinstance(dp_degree, bool) or not isinstance(dp_degree, int) or dp_degree < 1:
        raise ConfigError(f"dp_degree must be a positive whole number, not {dp_degree!r}")
    strange = sorted(set(auto) - set(implemented_paths(type(config))))
    if strange:
        raise ConfigError(f"values given for unknown keys: {', '.join(strange)}")
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
    made = found_now.required()
    made._document, made._notes = document, tuple(dict.fromkeys((*config.notes, *found_now.notes)))
    made._resolved_autos = tuple(found)
    return made


def _autos(section: Section, path: Path) -> list[tuple[Path, Section]]:
    """Return every key that is "auto", with its section."""
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
    """Return the value of one "auto": the caller's, else the default of its key.

    `tree` is resolved up to this key; `optimizer` comes before `scheduler`.
    """
    name, key = dotted(path), str(path[-1])
    if auto.get(name) is not None:
        return ResolvedAuto(name, auto[name], "given by the run")
    if name == "scheduler.params.warmup_max_lr" and config.optimizer is not None:
        return ResolvedAuto(name, tree["optimizer"]["params"]["lr"], "the optimizer's learning rate")
    if key in section.auto_needs_value or type(section).model_fields[key].is_required():
        return Problem(path, '"auto" has no value: nothing in this run sets it', "write the value")
    default = defaults_at(config, path).get(key, type(section).model_fields[key].get_default())
    return ResolvedAuto(name, default, "the key's default")


def defaults_at(config: Config, path: Path) -> Mapping[str, Any]:
    """Return the defaults at `path` that depend on the enclosing section (such as an optimizer's type)."""
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
    """Write the solved batch keys to `tree`; return those that the user did not set."""
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


OPTIMIZER, SCHEDULE = "AdamW", "WarmupCosineLR"
LR, DECAY, WARMUP = ("optimizer", "params", "lr"), ("optimizer", "params", "weight_decay"), "warmup_num_steps"
PEAKS = {
    **dict.fromkeys(("WarmupLR", "WarmupDecayLR"), "warmup_max_lr"),
    "OneCycle": "cycle_max_lr",
    "LRRangeTest": "lr_range_test_min_lr",
    **dict.fromkeys(("OneCycleLR", "CyclicLR"), "max_lr"),
}
"""Schedules that override the optimizer's learning rate -> the key of theirs."""
FLAGS = ("--learning-rate", "--weight-decay", "--warmup-steps", "--batch-size")


def flags_for_json(args: object) -> dict[str, Any]:
    """Return the values of a recipe's parsed flags that correspond to keys of the JSON, for `complete`."""
    return {flag: getattr(args, flag.lstrip("-").replace("-", "_"), None) for flag in FLAGS}


def complete(config: Config, flags: Mapping[str, Any]) -> Config:
    """Return a copy in which flags set the keys that are "auto" or missing.

    A JSON without `optimizer` gets AdamW. A JSON without `scheduler` gets a cosine schedule with warm-up if
    the optimizer is the recipe's too, or if `--warmup-steps` is given. Otherwise the optimizer of the JSON
    keeps its learning rate, as in DeepSpeed. Keys without a flag stay "auto": the recipe sets them once it
    has loaded its data.

    Args:
        flags: flag, such as "--learning-rate", -> its value; None if it was not given.

    Raises:
        ConfigError: a flag contradicts the JSON, or there is no key for it.
    """
    return _Completion(config).done({flag: value for flag, value in flags.items() if value is not None})


class _Completion:
    """The tree of a configuration while flags are written into it."""

    def __init__(self, config: Config) -> None:
        self.config, self.document = config, config._document
        self.tree = copy.deepcopy(self.document.tree)
        self.problems: list[Problem] = []
        self.chosen: list[ResolvedAuto] = []
        self.notes: list[Note] = []

    def done(self, flags: Mapping[str, Any]) -> Config:
        self.bring(scheduled="--warmup-steps" in flags)
        for flag, value in flags.items():
            self.say(flag, value)
        if self.problems:
            raise ConfigProblems(self.document.name, self.problems, self.document.described)
        if not self.notes and not self.chosen:
            return self.config
        found = examine(type(self.config), replace(self.document, tree=self.tree, conversions=[]))
        made = found.required()
        made._document = found.document
        made._notes = tuple(dict.fromkeys((*self.notes, *self.config.notes, *found.notes)))
        made._resolved_autos = tuple(self.chosen)
        return made

    def bring(self, *, scheduled: bool) -> None:
        """Add the optimizer and the schedule of the recipe."""
        lacks = [key for key in ("optimizer", "scheduler") if not self.tree.get(key)]
        if "optimizer" in lacks:
            self.tree["optimizer"] = {"type": OPTIMIZER, "params": {"lr": AUTO, "weight_decay": AUTO}}
            what = f"is not in the JSON: the recipe uses {OPTIMIZER}"
            self.notes.append(Note(("optimizer",), "differs", what))
        if "scheduler" in lacks and (scheduled or "optimizer" in lacks):
            params = {"total_num_steps": AUTO, WARMUP: AUTO, "warmup_type": "linear"}
            self.tree["scheduler"] = {"type": SCHEDULE, "params": params}
            what = f"is not in the JSON: the recipe uses {SCHEDULE}"
            self.notes.append(Note(("scheduler",), "differs", what))
        elif "scheduler" in lacks:
            what = "is not in the JSON: the learning rate is constant; --warmup-steps adds a schedule"
            self.notes.append(Note(("scheduler",), "differs", what))

    def say(self, flag: str, value: Any) -> None:
        if flag == "--batch-size":
            self.say_batch(flag, value)
            return
        optimizer, scheduler = self.config.optimizer, self.config.scheduler
        kind = optimizer.type if optimizer is not None else OPTIMIZER
        schedule = scheduler.type if scheduler is not None else SCHEDULE
        params = {} if scheduler is None else type(scheduler.params).model_fields
        if flag == "--learning-rate":
            self.write(LR, value, flag)
            for key in ("muon_lr", "adam_lr"):
                self.agrees(("optimizer", "params", key), value, flag)
            if scheduler is not None and schedule in PEAKS:
                self.write(("scheduler", "params", PEAKS[schedule]), value, flag)
        elif flag == "--weight-decay" and "weight_decay" not in TYPES[kind].keywords:
            self.refuse(
                ("optimizer", "type"), f"{flag} is given, but {kind} has no weight decay", f"remove {flag}"
            )
        elif flag == "--weight-decay":
            self.write(DECAY, value, flag)
        elif scheduler is not None and WARMUP not in params:
            self.refuse(
                ("scheduler", "type"), f"{flag} is given, but {schedule} has no {WARMUP}", f"remove {flag}"
            )
        else:
            self.write(("scheduler", "params", WARMUP), value, flag)

    def say_batch(self, flag: str, value: int) -> None:
        if self.config.elasticity.on:
            what = f"{flag} is given, but elasticity chooses the batch size"
            self.refuse(("elasticity",), what, f"remove {flag}")
            return
        self.write((TRAIN,), value, flag)

    def write(self, path: Path, value: Any, flag: str) -> None:
        """Set a key that is "auto" or missing to `value`."""
        if not self.agrees(path, value, flag):
            return
        node = self.tree
        for key in path[:-1]:
            if not isinstance(node.get(str(key)), dict):
                node[str(key)] = {}
            node = node[str(key)]
        node[str(path[-1])] = value
        self.chosen.append(ResolvedAuto(dotted(path), value, flag))

    def agrees(self, path: Path, value: Any, flag: str) -> bool:
        """Return whether the key is "auto" or missing; a value that contradicts the flag is a problem."""
        written: Any = self.document.tree
        for key in path:
            written = written.get(key) if isinstance(written, dict) else None
        if written is None or written == AUTO:
            return True
        if written != value:
            what = f"is {show(written)}, but {flag} is {show(value)}"
            self.refuse(path, what, f'remove {flag}, or write "auto" in the JSON')
        return False

    def refuse(self, path: Path, what: str, fix: str) -> None:
        self.problems.append(Problem(path, what, fix))


def micro_batch_of(config: Config, dp_degree: int, most: int) -> int | None:
    """Return the micro batch size if the JSON leaves it to the recipe, else None.

    Args:
        most: upper bound, the size that the recipe would choose itself.
    """
    train, micro, accumulation = (getattr(config, key) for key in (TRAIN, MICRO, ACCUMULATION))
    if config.elasticity.on or isinstance(micro, int):
        return None
    if not isinstance(train, int):
        return most
    by_flag = any(auto.path == TRAIN for auto in config.resolved_autos)
    if not by_flag or isinstance(accumulation, int) or train % dp_degree:
        return None  # the batch equation determines it, or has no solution
    return max(each for each in divisors(train // dp_degree) if each <= most)
