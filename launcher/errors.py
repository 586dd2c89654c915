"""Errors for people: what happened, where, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Iterable

_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but for tab and newline, marks that turn the direction of text, and halves of characters."""


def printable(text: str) -> str:
    """Return the text with what would act on a terminal, or cannot be encoded, as an escape: `\\x1b`."""
    return _UNPRINTABLE.sub(lambda found: ascii(found.group())[1:-1], text)


def shortened(text: str, most: int = 80) -> str:
    """Return the text on one line, and not longer than `most` characters."""
    line = text.replace("\n", "\\n").replace("\t", "\\t")
    return line if len(line) <= most else f"{line[: most - 3]}..."


def first_names(names: Iterable[str], most: int = 4, between: str = ", ") -> str:
    """Return the first names of many, and how many more there are: "a, b, c, d and 3 more"."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return between.join(names[:most]) + more


class LauncherError(Exception):
    """A mistake that a person can fix. The command line prints it without a traceback.

    Args:
        what: one sentence with the offending value in it.
        where: the place to look: `file.json:12:5 zero_optimization.stage`, `host:rank`, a parameter's name.
        fix: what to write or do instead.

    Attributes:
        kind: what a rank that ends with it records of itself (`cluster/failure.py`).
    """

    kind = "mendable"

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        self.what, self.where, self.fix = what, where, fix
        super().__init__(str(self))

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return printable("\n".join(lines))


class ConfigError(LauncherError, ValueError):
    """The JSON, or a flag, says something that cannot be done."""


class ArgumentsError(ConfigError, AssertionError):
    """A call lacks what it cannot do without, was given it twice, or was given what contradicts the JSON."""


class UntestedOptimizerError(ConfigError, AssertionError):
    """An optimizer that is not known to be elementwise, without `zero_allow_untested_optimizer`."""


class MisplacedCallError(LauncherError, AssertionError):
    """A method of an engine at a moment that has no meaning for it."""


class UnusedParametersError(LauncherError, AssertionError):
    """Parameters got no gradient, and `zero_optimization.ignore_unused_parameters` is false."""


class NotFiniteError(LauncherError):
    """Training gives numbers that are not finite: going on is of no use."""

    kind = "diverged"


class CheckpointError(LauncherError):
    """A checkpoint is missing, incomplete or does not fit the model."""


class TagsDiffer(CheckpointError, AssertionError):
    """Ranks name different checkpoints, and `checkpoint.tag_validation` is "Fail"."""


class ShardedParameterError(LauncherError, RuntimeError):
    """The data of a sharded parameter was touched while it was not gathered."""


class SplitLogitsError(LauncherError, RuntimeError):
    """Logits were touched of which this rank has some columns only."""


class ElsewhereError(LauncherError, AttributeError):
    """A part of the model was touched that another pipeline stage holds."""


class OffloadError(LauncherError):
    """A tier cannot keep what it is given, or does not give back what it was given."""
