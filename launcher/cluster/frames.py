"""Tracebacks for the terminal: every frame of the user's own code; runs of library frames as one line each.

The log of the rank contains the full traceback.
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
FEW = 2  # longest run of library frames that is not folded; frames kept at the end if a library raised


class _Frame(NamedTuple):
    """The lines of one frame; `package` is None in the user's own code."""

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
    """Return the lines of a traceback (or of a chain of them), with most library frames folded."""
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
    """Fold runs of library frames into one line each; keep the last two frames if a library raised the
    error."""
    runs = [(own, list(run)) for own, run in groupby(frames, key=lambda frame: frame.package is None)]
    if all(not own for own, _ in runs):
        return [
            line for frame in frames for line in frame.lines
        ]  # no user code to point out: keep all frames
    shown: list[str] = []
    for number, (own, run) in enumerate(runs):
        kept = FEW if number == len(runs) - 1 else 0
        hidden = [] if own or len(run) <= FEW + kept else run[: len(run) - kept]
        if hidden:
            packages = ", ".join(dict.fromkeys(str(frame.package) for frame in hidden))
            shown.append(f"  ... {len(hidden)} frames of {packages}: all are in the log")
        shown += [line for frame in run[len(hidden) :] for line in frame.lines]
    return shown
