"""Matches the param groups of a checkpoint to those of the run that loads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.errors import CheckpointError

LABELS = {"name", "moe"}
"""Options that do not affect the step."""


def take_options(
    groups: Sequence[dict[str, Any]], saved: Mapping[str, Any], names: Sequence[Sequence[str]]
) -> None:
    """Load the saved options of the parameters into the param groups of a run.

    Raises:
        CheckpointError: as `saved_groups`.
    """
    for group, number in zip(groups, saved_groups(saved, names), strict=True):
        # JSON has no tuples: restore the type that the optimizer uses
        options = saved["param_groups"][number].items()
        group.update({key: tuple(value) if isinstance(value, list) else value for key, value in options})


def saved_groups(saved: Mapping[str, Any], names: Sequence[Sequence[str]]) -> list[int]:
    """Return, for each group of a run, the number of the saved group whose options it takes.

    A script may create its groups in another order, or fewer of them: DeepSpeed puts experts into separate
    groups.

    Args:
        saved: the saved param_groups, and the names of their parameters unless an older version wrote the
            checkpoint.
        names: names of this rank's parameters, by group.

    Raises:
        CheckpointError: the parameters of one group were in several saved groups with different options.
    """
    options, own = list(saved["param_groups"]), saved.get("names")
    if own is None:
        _check_count(len(options), len(names))
        return list(range(len(names)))
    number_of = {name: number for number, group in enumerate(own) for name in group}
    found = []
    for at, group in enumerate(names):
        numbers = dict.fromkeys(number_of[name] for name in group if name in number_of)
        if not numbers:  # all parameters are on another pipeline stage
            _check_count(len(options), len(names))
        several = {number: _telling(options[number]) for number in numbers}
        first = next(iter(several), at)
        if other := next((n for n, option in several.items() if option != several[first]), None):
            raise CheckpointError(
                f"the parameters of param group {at} were in param groups {first} and {other} of the "
                f"checkpoint, whose options differ: {_difference(several[first], several[other])}",
                fix="start the recipe with --decay matrices; in a script, create the same param "
                "groups, or pass load_optimizer_states=False",
            )
        found.append(first)
    return found


def schedule_of(state: Mapping[str, Any], groups: Sequence[int], count: int) -> dict[str, Any]:
    """Return the state of a schedule, including nested schedules, with its per-group lists rearranged for
    these groups.

    Args:
        groups: for each group of the run, the number of its saved group.
        count: the number of saved groups.
    """
    return {key: _by_group(key, value, groups, count) for key, value in state.items()}


def _by_group(key: Any, value: Any, groups: Sequence[int], count: int) -> Any:
    if type(value) is dict:  # not for subclasses such as the Counter of milestones
        return schedule_of(value, groups, count)
    if isinstance(value, list) and any(type(inner) is dict for inner in value):
        return [_by_group(key, inner, groups, count) for inner in value]
    named = str(key).endswith(("lr", "lrs", "momentums"))
    is_by_group = named and isinstance(value, list) and len(value) == count
    return [value[number] for number in groups] if is_by_group else value


def _check_count(saved: int, here: int) -> None:
    if saved != here:
        raise CheckpointError(
            f"the checkpoint has {saved} param groups, but this run has {here}",
            fix="create the same param groups, or pass load_optimizer_states=False",
        )


def _telling(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key not in LABELS}


def _difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    differing = [key for key in one if one[key] != other.get(key)]
    return ", ".join(f"{key} {one[key]} and {other.get(key)}" for key in differing)
