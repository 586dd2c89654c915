"""`launch top`: shows a run in a terminal, live or after it has ended."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from launcher.cli.flags import FlagParser
from launcher.cli.output import write
from launcher.cluster.hostfile import read_hostfile
from launcher.cluster.run_mirror import RunMirror
from launcher.cluster.run_status import ASKED, STACKS
from launcher.cluster.runners import RunnerOptions
from launcher.errors import ConfigError, printable
from launcher.top.run_report import REPORT, run_report
from launcher.top.run_screen import in_order, render
from launcher.top.run_view import EstimatedPeaks, RunView, find_status, read_estimate, read_run

EVERY_S = 1.0
STACKS_S = 5.0
"""Seconds to wait for stacks."""
DESCRIPTION = """\
Shows what every rank of a run does: its step, where its time goes (own work, waits for other ranks, saves), its memory,
whether it is slower than the others, the last checkpoint, restarts and messages, and the stages of a pipeline. The run
itself is not queried: `launch` writes logs/status.json in the run's directory once a second, on the machine where it
was started. If that is another machine, use --hostfile."""
KEYS = "q quit | sort: t time w wait m memory r rank | up, down: select a rank | l log s stack"


def top_parser() -> FlagParser:
    """Return the parser of `launch top`."""
    parser = FlagParser(
        prog="launch top", description=DESCRIPTION, epilog=f"{KEYS}\nexample: launch top runs/pretrain-1"
    )
    parser.add_argument(
        "run", nargs="?", metavar="RUN_DIR", help="the run's directory (default: the newest one here)"
    )
    parser.add_argument(
        "-H",
        "--hostfile",
        metavar="PATH",
        help="the run was started on one of these hosts: find it over ssh",
    )
    parser.add_argument("--ssh_port", type=int, metavar="P", help="with --hostfile: the port of ssh")
    parser.add_argument(
        "--estimate",
        metavar="FILE",
        help="output of `launch memory-estimate --json`, to compare the memory with",
    )
    once = parser.add_mutually_exclusive_group()
    once.add_argument("--once", action="store_true", help="print one screen and exit")
    once.add_argument(
        "--html", metavar="FILE", help="write an HTML page and exit; - is report.html in the run's directory"
    )
    once.add_argument("--json", action="store_true", help="print the status as JSON and exit")
    return parser


def top(argv: Sequence[str]) -> int:
    """Run `launch top [RUN_DIR] [--once | --json | --html FILE]`."""
    flags = top_parser().parse_args(argv)
    estimate = None if flags.estimate is None else read_estimate(Path(flags.estimate))
    if flags.hostfile is None:
        return _show(flags, RunFiles(find_status(flags.run), estimate))
    if flags.html == "-":
        raise ConfigError(
            "the run is on another host", where="--html -", fix="name a file: --html report.html"
        )
    options = RunnerOptions(ssh_port=flags.ssh_port)
    with RunMirror(read_hostfile(flags.hostfile), options, flags.run) as mirror:
        mirror.wait()
        return _show(flags, MirroredFiles(mirror, estimate))


class RunFiles:
    """The files of a run, and requests to it.

    Attributes:
        called: display name of the run; "" shows its directory.
    """

    called = ""

    def __init__(self, status: Path, estimate: EstimatedPeaks | None = None) -> None:
        self.status, self._estimate = status, estimate

    def read(self, before: RunView | None = None, counters: dict[int, Any] | None = None) -> RunView:
        """Return the current state of the run from its files; see `read_run`."""
        return replace(read_run(self.status, before, counters), called=self.called, estimate=self._estimate)

    def ask_stacks(self) -> None:
        """Request that the run write the stacks of its ranks."""
        with contextlib.suppress(OSError):  # another user's run, whose stacks cannot be requested
            (self.status.parent / ASKED).touch()

    def ask_log(self, rank: int) -> None:
        """Request a copy of a rank's log; does nothing here, since local logs are read in place."""


class MirroredFiles(RunFiles):
    """Local copies of the files of a run on another host."""

    def __init__(self, mirror: RunMirror, estimate: EstimatedPeaks | None) -> None:
        super().__init__(mirror.status, estimate)
        self._mirror, self.called = mirror, mirror.called

    def ask_stacks(self) -> None:
        self._mirror.ask_stacks()

    def ask_log(self, rank: int) -> None:
        self._mirror.ask_log(rank)


def _show(flags: argparse.Namespace, files: RunFiles) -> int:
    view = files.read()
    if flags.json:
        print(json.dumps(view.as_json(), indent=1))
        return 0
    if flags.html:
        over = flags.html == "-"
        file = view.directory / REPORT if over else Path(flags.html)
        write(file, run_report(view), "--html", over=over)
        print(file)
        return 0
    console = Console(highlight=False)
    if flags.once or not (console.is_terminal and sys.stdin.isatty()):
        console.print(render(view, console.width))
        return 0
    with contextlib.suppress(KeyboardInterrupt):
        _Screen(files, view).run(console)
    return 0


@dataclass
class _Screen:
    """The live view and its interactive state."""

    files: RunFiles
    view: RunView
    order: str = "r"
    chosen: int = -1
    """The selected rank; -1 if none is selected, which counts as rank 0."""
    shown: str = "table"
    """One of table, log and stack."""
    counters: dict[int, Any] = field(default_factory=dict)
    asked_at: float = 0.0
    scrolled: int = 0
    """Lines scrolled from the start of a stack, or from the end of a log."""

    def run(self, console: Console) -> None:
        from rich.live import Live

        with _keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
            due = 0.0
            while True:
                if time.monotonic() >= due:
                    self.view = self.files.read(self.view, self.counters)
                    due = time.monotonic() + EVERY_S
                live.update(self._drawn(console.width, console.height), refresh=True)
                for key in keys(max(0.0, due - time.monotonic())):
                    if not self._press(key):
                        return

    def _press(self, key: str) -> bool:
        """Handle a key; return whether to continue."""
        match key:
            case "q" | "\x03" | "\x04":
                return False
            case "\x1b":  # Escape
                self.shown = "table"
            case "t" | "w" | "m" | "r":
                self.order, self.shown = key, "table"
            case "\x1b[A" | "k":
                self._move(-1)
            case "\x1b[B" | "j":
                self._move(1)
            case "l" | "\r" | "\n":
                self.shown, self.scrolled = "log", 0
                self.files.ask_log(max(0, self.chosen))
            case "s":
                self.shown, self.asked_at, self.scrolled = "stack", time.time(), 0
                if self.view.state == "running":
                    self.files.ask_stacks()
        return True

    def _move(self, further: int) -> None:
        """Scroll the shown text, or move the selection in the sorted list."""
        if self.shown != "table":
            self.scrolled = max(0, self.scrolled + further * (1 if self.shown == "stack" else -1))
            return
        listed = [rank.rank for rank in in_order(self.view, self.order)]
        if not listed:
            return
        at = listed.index(self.chosen) + further if self.chosen in listed else 0
        self.chosen = listed[min(max(at, 0), len(listed) - 1)]

    def _drawn(self, width: int, height: int) -> RenderableType:
        if self.shown == "table":
            return render(self.view, width, height, self.order, self.chosen, KEYS)
        rank = max(0, self.chosen)
        text = self._log(rank) if self.shown == "log" else self._stack(rank)
        lines, room = text.splitlines(), height - 2
        self.scrolled = min(self.scrolled, max(0, len(lines) - room))
        # A stack starts with the innermost call; a log ends with the newest line.
        end = len(lines) - self.scrolled
        lines = lines[self.scrolled :][:room] if self.shown == "stack" else lines[max(0, end - room) : end]
        screen = Text(no_wrap=True, overflow="ellipsis")
        screen.append(f"rank {rank}: {self.shown}; up, down: scroll, Escape: back\n", style="bold")
        return screen.append("\n".join(lines) or "(empty)")

    def _log(self, rank: int) -> str:
        for path in sorted(self.files.status.parent.glob(f"*rank{rank}.log")):
            with contextlib.suppress(OSError), path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - (1 << 16)))
                return printable(file.read().decode("utf-8", errors="replace"))
        return f"no log of rank {rank} in {self.files.status.parent}; the log is on the rank's host"

    def _stack(self, rank: int) -> str:
        path = self.files.status.parent / STACKS
        if not path.exists() or path.stat().st_mtime < self.asked_at - 1:
            late = time.time() - self.asked_at > STACKS_S
            return (
                "no stack received: the run has ended or belongs to another user"
                if late
                else "requesting the stacks ..."
            )
        parts = path.read_text(encoding="utf-8", errors="replace").split("==== rank ")
        mine = [part for part in parts if part.startswith(f"{rank} ")]
        return (
            printable(short_stack(mine[0])) if mine else f"no stack from rank {rank}: its process has ended"
        )


def short_stack(text: str) -> str:
    """Return the stacks of a process, as written by faulthandler, in a compact form.

    The main thread, which faulthandler writes last, comes first. Each call shows function, file and line.
    """
    head, *threads = re.split(r"\n(?=(?:Current thread|Thread) 0x)", text)
    lines = []
    for thread in [*threads[-1:], *threads[:-1]]:
        for line in thread.splitlines():
            call = re.match(r'\s*File "(.*)", line (\d+) in (.*)', line)
            lines.append(f"  {call[3]}  {_short(call[1])}:{call[2]}" if call else line)
    return "\n".join([*head.splitlines(), *lines])


def _short(path: str) -> str:
    """Return the path relative to site-packages, or its last two parts."""
    _, found, below = path.rpartition("/site-packages/")
    return below if found else "/".join(path.rsplit("/", 2)[-2:])


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], list[str]]]:
    """Yield a function that returns the keys pressed within a timeout; the terminal does not echo them."""
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)

    def pressed(seconds: float) -> list[str]:
        if not select.select([descriptor], [], [], seconds)[0]:
            return []
        text = os.read(descriptor, 64).decode(errors="replace")
        return [text] if text.startswith("\x1b") else list(text)

    try:
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
