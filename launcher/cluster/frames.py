"""A traceback for the terminal: every frame of the user's own code, and runs of library frames as one line.

The log of the rank has the whole of it.
"""

from __future__ import annotations

import re
import sys
import sysconfig
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>.+)')
_PACKAGE = re.compile(r".*/(?:site|dist)-packages/(?P<package>[^/.]+)")
_OURS = Path(__file__).resolve().parents[1]
_STANDARD = tuple({sysconfig.get_path("stdlib"), str(Path(sys.base_prefix) / "lib" / "python")})
FEW = 2  # library frames that are shown as they are, and those that stay where a library raises


class _Frame(NamedTuple):
    """Lines of one frame; `package` is None in the user's own code."""

    lines: list[str]
    package: str | None


def package_of(file: str) -> str | None:
    """Return the library that a file belongs to; None for the user's own."""
    found = _PACKAGE.match(file)
    if found:
        return found["package"]
    if file.startswith(f"{_OURS}/"):
        return _OURS.name
    return "Python" if file.startswith(("<", *_STANDARD)) else None


def folded(traceback: str) -> list[str]:
    """Return the lines of a traceback (or of a chain of them), without most of what libraries did."""
    shown: list[str] = []
    frames: list[_Frame] = []
    for line in traceback.splitlines():
        found = _FRAME.fullmatch(line)
        if found:
            frames.append(_Frame([line], package_of(found["file"])))
        elif frames and line.startswith("    "):
            frames[-1].lines.append(line)
        else:
            shown += _fold(frames)
            frames = []
            shown.append(line)
    return shown + _fold(frames)


def last_own_line(traceback: str) -> str | None:
    """Return `file:line, in function` of the last frame of the user's own code; None where there is none."""
    frames = [_FRAME.fullmatch(line) for line in traceback.splitlines()]
    own = [found for found in frames if found and package_of(found["file"]) is None]
    return f"{own[-1]['file']}:{own[-1]['line']}, in {own[-1]['name']}" if own else None


def _fold(frames: list[_Frame]) -> list[str]:
    """Fold runs of library frames into one line each; the last two stay where the error was raised there."""
    runs = [(own, list(run)) for own, run in groupby(frames, key=lambda frame: frame.package is None)]
    if all(not own for own, _ in runs):
        return [
            line for frame in frames for line in frame.lines
        ]  # no code of the user's: nothing to find in it
    shown: list[str] = []
    for number, (own, run) in enumerate(runs):
        kept = FEW if number == len(runs) - 1 else 0
        hidden = [] if own or len(run) <= FEW + kept else run[: len(run) - kept]
        if hidden:
            packages = ", ".join(dict.fromkeys(str(frame.package) for frame in hidden))
            shown.append(f"  ... {len(hidden)} frames of {packages}: all are in the log")
        shown += [line for frame in run[len(hidden) :] for line in frame.lines]
    return shown
