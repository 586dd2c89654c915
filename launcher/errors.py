"""User-facing errors: what happened, where, and how to fix it."""

from __future__ import annotations

import re
from collections.abc import Iterable

_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and newline, bidirectional text marks, and lone surrogates."""


def printable(text: str) -> str:
    """Escape the characters that affect a terminal or cannot be encoded, as in `\\x1b`."""
    return _UNPRINTABLE.sub(lambda found: ascii(found.group())[1:-1], text)


def shortened(text: str, most: int = 80) -> str:
    """Return the text on one line, truncated to `most` characters."""
    line = text.replace("\n", "\\n").replace("\t", "\\t")
    return line if len(line) <= most else f"{line[: most - 3]}..."


def first_names(names: Iterable[str], most: int = 4, between: str = ", ") -> str:
    """Return the first `most` names and the number of the others: "a, b, c, d and 3 more"."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return between.join(names[:most]) + more


class LauncherError(Exception):
    """An error that the user can fix. The command line prints it without a traceback.

    Args:
        what: one sentence that contains the offending value.
        where: the place to look: `file.json:12:5 zero_optimization.stage`, `host:rank`, a parameter's name.
        fix: what to write or do instead.

    Attributes:
        kind: the kind of failure that a rank records when it exits with this error (`cluster/failure.py`).
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
    """The config or a flag requests something impossible."""


class ArgumentsError(ConfigError, AssertionError):
    """A call lacks a required argument, received it twice, or its arguments contradict the config."""


class UntestedOptimizerError(ConfigError, AssertionError):
    """The optimizer is not known to be elementwise, and `zero_allow_untested_optimizer` is not set."""


class MisplacedCallError(LauncherError, AssertionError):
    """An engine method was called at a point where it has no meaning."""


class UnusedParametersError(LauncherError, AssertionError):
    """Parameters received no gradient, and `zero_optimization.ignore_unused_parameters` is false."""


class NotFiniteError(LauncherError):
    """Training produced non-finite values; continuing is pointless."""

    kind = "diverged"


class CheckpointError(LauncherError):
    """A checkpoint is missing, incomplete or does not fit the model."""


class TagsDiffer(CheckpointError, AssertionError):
    """Ranks name different checkpoints, and `checkpoint.tag_validation` is "Fail"."""


class ShardedParameterError(LauncherError, RuntimeError):
    """The data of a sharded parameter was accessed while it was not gathered."""


class SplitLogitsError(LauncherError, RuntimeError):
    """Logits were accessed of which this rank holds only some columns."""


class ElsewhereError(LauncherError, AttributeError):
    """A part of the model was accessed that another pipeline stage holds."""


class OffloadError(LauncherError):
    """A tier cannot store the data passed to it, or does not return the same data."""
