"""A lock that lets one run at a time write to an output directory; it names its owner, and ends with it."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from launcher.errors import ConfigError
from launcher.files import read_small

FILE = ".owner"
LARGEST = 1 << 16
"""Largest accepted size of a lock file in bytes; a real one has a few hundred."""
BEAT_S = 10.0
"""Seconds between an owner's heartbeats, which other machines check."""
SILENT_S = 120.0
"""Seconds without a heartbeat after which an owner on another machine counts as dead."""
LAST = 1e11
"""Latest timestamp that is accepted, in seconds since the epoch; no real clock is that far ahead."""


@dataclass(frozen=True)
class Owner:
    """The process that writes to a directory.

    Attributes:
        host, space: the machine, and its pid namespace (a container has its own).
        boot: identifies the boot of the machine; pids are meaningless after a reboot.
        pid, started: the process that holds the lock, and its start time, because pids are reused.
        since: when the lock was taken, in seconds since the epoch.
        run: the same for all processes of one run, including restarts.
    """

    host: str
    space: str
    boot: str
    pid: int
    started: int
    since: float
    run: str

    @classmethod
    def read(cls, content: dict[str, Any]) -> Owner:
        """Read an owner from JSON.

        Raises:
            TypeError, ValueError: the content does not describe an owner.
        """
        owner = cls(**content)
        for name, kind in (
            ("host", str),
            ("space", str),
            ("boot", str),
            ("run", str),
            ("pid", int),
            ("started", int),
        ):
            if type(getattr(owner, name)) is not kind:
                raise TypeError(f"{name} is not a {kind.__name__}")
        if not (0 < owner.pid < 1 << 31 and 0 <= float(owner.since) < LAST):
            raise ValueError("it is not a valid process id or time")
        return owner

    @classmethod
    def me(cls, run: str) -> Owner:
        place = socket.gethostname(), _space(), _boot()
        return cls(*place, os.getpid(), _started(os.getpid()), time.time(), run)

    def is_here(self) -> bool:
        """Return whether the owner's process would be visible from this one."""
        return (self.host, self.space) == (socket.gethostname(), _space())

    def is_gone(self, path: Path) -> str | None:
        """Return why this owner of the lock `path` is dead, or None if it may be alive."""
        if self.is_here():
            if self.boot != _boot():
                return f"{self.host} was restarted"
            alive = psutil.pid_exists(self.pid) and _started(self.pid) == self.started
            return None if alive else f"process {self.pid} has ended"
        silent = _age(path)
        return f"{self.host} has not responded for {silent:.0f} s" if silent > SILENT_S else None

    def is_this_process(self) -> bool:
        me = Owner.me(self.run)
        return self == replace(me, since=self.since)

    def __str__(self) -> str:
        if self == UNKNOWN:
            return self.host
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host}, since {since}"


UNKNOWN = Owner("an unknown host", "", "", 0, 0, 0.0, "")
"""Owner of an unreadable lock, which is released only by the `SILENT_S` timeout."""


def check_free(directory: Path, run: str = "") -> str | None:
    """Return the message to print before this run takes over the directory, or None. Changes nothing.

    Raises:
        ConfigError: another run owns the directory.
    """
    path = directory / FILE
    owner = _read(path)
    if owner is None or (run and owner.run == run) or owner.is_this_process():
        return None
    gone = owner.is_gone(path)
    if gone is None:
        age = "" if owner.is_here() else f"; it is considered dead after {SILENT_S:.0f} s without a heartbeat"
        raise ConfigError(
            f"another run is writing to {directory}: {owner}",
            where="--output-dir",
            fix=f"choose another directory, or stop that run{age}",
        )
    return f"taking over {directory} from {owner}: {gone}"


def is_held(directory: Path, run: str) -> bool:
    """Return whether a process of this run (the agent that started the ranks) owns the directory."""
    owner = _read(directory / FILE)
    return bool(run) and owner is not None and owner.run == run


class Ownership:
    """This process's ownership of a directory, for its run; a thread sends heartbeats to other machines.

    Released by `give_back`, or when the process exits.
    """

    def __init__(self, path: Path, me: Owner) -> None:
        self._path, self._me = path, me
        self._ended = threading.Event()
        self._successor: Owner | None = None
        threading.Thread(target=self._beat, name="owner", daemon=True).start()
        atexit.register(self.give_back)

    @property
    def directory(self) -> Path:
        return self._path.parent

    def check(self) -> None:
        """Raise `ConfigError` if another run has taken over the directory; this one must stop writing."""
        if self._successor is not None:
            raise ConfigError(
                f"another run has taken over {self.directory}: {self._successor}. This run had sent no "
                f"heartbeat for more than {SILENT_S:.0f} s; it stops because both runs would write to "
                "the same files",
                where="--output-dir",
                fix="continue in another directory: --output-dir NEW --resume DIR",
            )

    def give_back(self) -> None:
        self._ended.set()
        atexit.unregister(self.give_back)
        with contextlib.suppress(OSError, ConfigError):
            if os.getpid() == self._me.pid and _read(self._path) == self._me:
                self._path.unlink()

    def _beat(self) -> None:
        while self._successor is None and not self._ended.wait(BEAT_S):
            with contextlib.suppress(OSError, ConfigError):  # a shared disk may be unavailable for a while
                self._look()

    def _look(self) -> None:
        """Touch the lock if this process still owns it."""
        now = _read(self._path)
        if now is None:
            _write(self._path, self._me)  # it was removed
        elif now == self._me:
            os.utime(self._path)
        elif now.run != self._me.run and now != UNKNOWN:
            self._successor = now


def take(directory: Path, run: str, say: Callable[[str], None]) -> Ownership:
    """Make this process, and so its run, the owner of `directory`.

    Raises:
        ConfigError: another run owns the directory, or no lock can be created in it.
    """
    path, me = directory / FILE, Owner.me(run or uuid.uuid4().hex)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(directory):
            for _ in range(3):
                if _write(path, me):
                    return Ownership(path, me)
                before = _read(path)
                if (note := check_free(directory, run)) is not None:
                    say(note)
                _move_away(path, before)
    except OSError as error:
        raise ConfigError(
            f"cannot lock {directory}: failed to create {path}: {error}",
            where="--output-dir",
            fix="choose a writable directory on a file system that supports hard links",
        ) from error
    raise ConfigError(
        f"another run is locking {directory} at the same time",
        where="--output-dir",
        fix="start the run again",
    )


@contextlib.contextmanager
def _one_at_a_time(directory: Path) -> Iterator[None]:
    """Serialize the processes that take `directory`: only one of them may remove the lock of a dead owner.

    The operating system releases a flock when its process exits. Some shared file systems do not support
    flock on directories. There only the hard link decides, and two runs that replace a dead owner within the
    same millisecond may not notice each other.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write(path: Path, me: Owner) -> bool:
    """Create the lock atomically, also on a shared file system. Return False if there already is one."""
    mine = path.with_name(f"{FILE}.{me.host}.{me.pid}")
    mine.write_text(json.dumps(asdict(me)))
    try:
        os.link(mine, path)
    except FileExistsError:
        return False
    finally:
        mine.unlink()
    return True


def _move_away(path: Path, gone: Owner | None) -> None:
    """Remove the lock of a dead owner, unless another process has taken it meanwhile."""
    aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, aside)
        if _read(aside) != gone:
            with contextlib.suppress(FileExistsError):
                os.link(aside, path)
        aside.unlink()


def _read(path: Path) -> Owner | None:
    """Return the owner of the lock, or None if there is no lock.

    Raises:
        ConfigError: the file cannot have been written by a run.
    """
    try:
        text = read_small(
            path,
            "the lock",
            where="--output-dir",
            fix=f"this file was not written by launcher: remove {path}, or choose another directory",
            largest=LARGEST,
        )
    except ConfigError as error:
        if isinstance(error.__context__, FileNotFoundError):  # do not retry: that may find another run's lock
            return None
        raise
    try:
        return Owner.read(json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return UNKNOWN


def _age(path: Path) -> float:
    """Return the seconds since the last heartbeat, by the clock of the file system."""
    probe = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        probe.touch()
        return probe.stat().st_mtime - path.stat().st_mtime
    except OSError:  # the lock was removed, or its age is unknown
        return 0.0
    finally:
        probe.unlink(missing_ok=True)


def _space() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return str(int(psutil.boot_time()))


def _started(pid: int) -> int:
    """Return the start time of a process in ticks since boot, or 0 if it does not exist or is unknown."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0
