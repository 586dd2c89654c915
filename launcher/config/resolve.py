"""Filling in what a file leaves open: `complete` with a recipe's flags, `resolved` once ranks and model are known.

`complete` brings the recipe's optimizer and schedule where the JSON has none. `resolved` removes every "auto", and
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
    """The value that an "auto", or a batch key that was left out, became."""

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
    made = found_now.required()
    made._document, made._notes = document, tuple(dict.fromkeys((*config.notes, *found_now.notes)))
    made._resolved_autos = tuple(found)
    return made


def _autos(section: Section, path: Path) -> list[tuple[Path, Section]]:
    """List every key that says "auto", with its section."""
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
    """Return the value of one "auto": what the caller gives, else the default of its key.

    `tree` is resolved up to this key; optimizer comes before scheduler.
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
    """Return the defaults that depend on the section around (an optimizer's type)."""
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
    """Write the solved triple into the tree and tell what was not written by the user."""
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
"""Schedules that set a learning rate of their own, whatever the optimizer's -> its key."""
FLAGS = ("--learning-rate", "--weight-decay", "--warmup-steps", "--batch-size")


def flags_for_json(args: object) -> dict[str, Any]:
    """Return what a recipe's parsed flags say of keys of the JSON, for `complete`."""
    return {flag: getattr(args, flag.lstrip("-").replace("-", "_"), None) for flag in FLAGS}


def complete(config: Config, flags: Mapping[str, Any]) -> Config:
    """Return a copy with what the flags say in the place of "auto" and of keys that are left out.

    A JSON without `optimizer` gets AdamW. One without `scheduler` gets a cosine with warm-up where the optimizer is the
    recipe's, too, or `--warmup-steps` is said; the optimizer of a JSON alone keeps its learning rate, as in DeepSpeed.
    What no flag says stays "auto": the recipe knows it when it knows its data.

    Args:
        flags: flag, such as "--learning-rate", -> its value; None where it was not said.

    Raises:
        ConfigError: a flag contradicts what is written, or there is no key for it.
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
        """Bring the optimizer and the schedule of the recipe."""
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
                ("optimizer", "type"), f"{flag} is given, but {kind} has no weight decay", f"drop {flag}"
            )
        elif flag == "--weight-decay":
            self.write(DECAY, value, flag)
        elif scheduler is not None and WARMUP not in params:
            self.refuse(
                ("scheduler", "type"), f"{flag} is given, but {schedule} has no {WARMUP}", f"drop {flag}"
            )
        else:
            self.write(("scheduler", "params", WARMUP), value, flag)

    def say_batch(self, flag: str, value: int) -> None:
        if self.config.elasticity.on:
            what = f"{flag} is given, but elasticity chooses the batch size"
            self.refuse(("elasticity",), what, f"drop {flag}")
            return
        self.write((TRAIN,), value, flag)

    def write(self, path: Path, value: Any, flag: str) -> None:
        """Write `value` for a key that is "auto" or left out."""
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
        """Return whether the key is open, or says the same; a contradiction is a problem."""
        written: Any = self.document.tree
        for key in path:
            written = written.get(key) if isinstance(written, dict) else None
        if written is None or written == AUTO:
            return True
        if written != value:
            what = f"is {show(written)}, but {flag} is {show(value)}"
            self.refuse(path, what, f'drop {flag}, or write "auto" there')
        return False

    def refuse(self, path: Path, what: str, fix: str) -> None:
        self.problems.append(Problem(path, what, fix))


def micro_batch_of(config: Config, dp_degree: int, most: int) -> int | None:
    """Return how many sequences a rank takes at a time, where the JSON leaves it to the recipe; None where it does not.

    Args:
        most: as many as the recipe would take by itself.
    """
    train, micro, accumulation = (getattr(config, key) for key in (TRAIN, MICRO, ACCUMULATION))
    if config.elasticity.on or isinstance(micro, int):
        return None
    if not isinstance(train, int):
        return most
    by_flag = any(auto.path == TRAIN for auto in config.resolved_autos)
    if not by_flag or isinstance(accumulation, int) or train % dp_degree:
        return None  # the batch equation says it, or that it has no solution
    return max(each for each in divisors(train // dp_degree) if each <= most)
