"""Detection of the rank that failed first, and the error message about it."""

from __future__ import annotations

import contextlib
import errno
import json
import signal
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from launcher.cluster.frames import folded, last_own_line
from launcher.cluster.memory_killer import ALLOWANCE

TAIL_LINES = 20
_CODES = {"mendable": 2, "diverged": 1, "exception": 1}
"""Exit codes by the kind of record; `rank.py` uses the same."""
SAID = ("mendable", "diverged")
"""Kinds whose message is complete and written for users."""
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""Error messages of communication backends when another rank is gone."""


@dataclass(frozen=True)
class ErrorRecord:
    """The record that a rank wrote about its own failure (see `rank.py`)."""

    kind: str
    """`mendable` or `diverged` (of a LauncherError), `exception`, or `exit` (sys.exit with non-zero code)."""
    message: str
    traceback: str
    time: float
    """Seconds since the epoch."""


@dataclass(frozen=True)
class Failure:
    """A rank that failed."""

    rank: int
    pid: int
    exit_code: int | None
    """As in `subprocess`: negative for a signal; None if the rank was still exiting."""
    record: ErrorRecord | None
    time: float = 0.0
    """Seconds since the epoch, by the clock of the machine that holds this object."""
    local_rank: int = 0
    log: str = ""
    tail: Sequence[str] = ()
    """The last lines of its log."""
    memory_killer: str | None = None
    """The evidence that the kernel killed it for lack of memory; None without any."""
    disk_full: bool = False
    """Its log can no longer be written because the disk is full."""
    left_before: Sequence[int] = ()
    """Ranks of its node that had already ended successfully."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> Failure:
        record = tree["record"] and ErrorRecord(**tree["record"])
        sequences = {name: tuple(tree[name]) for name in ("tail", "left_before")}
        return cls(**{**tree, "record": record, **sequences})


def read_record(path: str) -> ErrorRecord | None:
    """Return the record at `path`, or None if the rank left none (it was killed, or was still running)."""
    try:
        message = json.loads(Path(path).read_text(encoding="utf-8"))["message"]
        extra = message["extraInfo"]
        when = float(extra.get("time", extra["timestamp"]))
        return ErrorRecord(extra.get("kind", "exception"), message["message"], extra["py_callstack"], when)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def first_failure(
    exit_codes: Mapping[int, int], records: Mapping[int, ErrorRecord], pids: Mapping[int, int], seen_at: float
) -> Failure:
    """Return the rank whose failure came first; the others mostly fail because of it.

    Args:
        exit_codes: non-zero exit codes of the ranks that were dead when the failure was noticed.
        records: the error records of the ranks, including ranks that were still exiting.
        seen_at: a time before which no rank had been seen dead (seconds since the epoch). It is used as the
            failure time of a rank that was killed and could record nothing.
    """
    times = {rank: record.time for rank, record in records.items()}
    for rank in exit_codes:
        times.setdefault(rank, seen_at)
    rank = min(times, key=lambda candidate: (times[candidate], candidate))
    return Failure(rank, pids[rank], exit_codes.get(rank), records.get(rank), times[rank])


def describe(failure: Failure, *, log_was_shown: bool, place: str = "", host: str = "") -> str:
    """Return the message for the terminal, without the leading `error:`.

    Args:
        failure: the first failure.
        log_was_shown: the rank's output is already on the terminal, and its end need not be repeated.
        place: the rank's coordinates in the mesh.
        host: the host it ran on; empty if there is only one machine.
    """
    record, log = failure.record, f"{host}:{failure.log}" if host else failure.log
    at = f"{host}, local rank {failure.local_rank}" if host else ""
    who = f"rank {failure.rank} ({', '.join(filter(None, (place, at, f'pid {failure.pid}')))})"
    if record is not None and record.kind in SAID:
        own = last_own_line(record.traceback)
        called = f"\n  called at: {own}" if own else ""
        return f"{record.message}{called}\n  reported by {who}; log: {log}"
    if record is not None and record.kind == "exception":
        lines = [
            f"{who} failed: {record.message}",
            *_indented(folded(record.traceback)),
            *_advice(failure),
        ]
    else:
        lines = [f"{who} {_manner(failure)}", *_advice(failure)]
        lines += [] if log_was_shown else _ended(failure, log)
    if host:
        lines.append(f"  its log: {log}")
    return "\n".join([*lines, f"  the other ranks have been stopped; logs: {Path(failure.log).parent}"])


def exit_code(failure: Failure) -> int:
    """Return the exit code of the launcher.

    It is 2 for a mistake that the user can fix, and 1 for an exception or non-finite numbers, however the
    rank ended afterwards; otherwise the rank's own code, 128 + n for signal n, and never 0.
    """
    if failure.record is not None and failure.record.kind in _CODES:
        return _CODES[failure.record.kind]
    if failure.exit_code is None or failure.exit_code == 0:
        return 1
    return failure.exit_code if failure.exit_code > 0 else 128 - failure.exit_code


def append_to_logs(records: Mapping[int, ErrorRecord], logs: Mapping[int, Path]) -> None:
    """Append each rank's error to its log. Ranks only record their errors, so that none interleave."""
    for rank, record in records.items():
        texts = {"exception": record.traceback, "exit": ""}
        text = texts.get(record.kind, f"error: {record.message}\n")
        if text:
            with contextlib.suppress(OSError), logs[rank].open("a", encoding="utf-8") as file:
                file.write(text)


def is_full(directory: Path) -> bool:
    """Return whether the disk of a log directory is full."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(1 << 16))
            file.flush()
    except OSError as error:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return False


def with_tail(failure: Failure, log: Path) -> Failure:
    """Return the failure with the last lines of the rank's log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 16384))
            lines = file.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
    except OSError:
        lines = []
    return replace(failure, log=str(log), tail=tuple(lines))


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _manner(failure: Failure) -> str:
    code = failure.exit_code
    if code is None:
        return "failed while exiting"
    if code >= 0:
        return f"ended with exit code {code}"
    if failure.memory_killer:
        return f"was killed by the kernel for lack of memory ({signal_name(-code)}; {failure.memory_killer})"
    return f"was killed by {signal_name(-code)}"


def _advice(failure: Failure) -> list[str]:
    if failure.disk_full:
        full = f"  the disk of {Path(failure.log).parent} is full: the output of the ranks cannot be saved"
        return [full, "  fix: free some space there, or use another --output-dir"]
    message = failure.record.message if failure.record is not None else ""
    if failure.left_before and any(words in message for words in LOST):
        ranks = ", ".join(map(str, failure.left_before))
        who = f"rank {ranks}" if len(failure.left_before) == 1 else f"ranks {ranks}"
        return [
            f"  {who} ended earlier, without an error, while this rank waited for it",
            "  fix: on every rank, call everything that requires all ranks: save_checkpoint(), "
            "save_16bit_model(), collectives",
        ]
    if failure.exit_code != -signal.SIGKILL:
        return []
    if failure.memory_killer:
        return [f"  fix: {ALLOWANCE}"]
    return ["  if the kernel's OOM killer was the cause, `dmesg | tail` shows it: use less memory per rank"]


def _ended(failure: Failure, log: str) -> Sequence[str]:
    if not failure.tail:
        return [f"  its log {log} is empty"]
    return [f"  last lines of {log}:", *_indented(failure.tail)]


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]
