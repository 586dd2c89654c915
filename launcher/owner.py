"""One run at a time writes to an output directory: a lock that says who has it, and that does not outlive its run."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from launcher.errors import ConfigError

FILE = ".owner"
BEAT_S = 10.0
"""How often an owner shows that it lives, to other machines."""
SILENT_S = 120.0
"""An owner on another machine that was silent for so long is gone."""


@dataclass(frozen=True)
class Owner:
    """Who writes to a directory.

    Attributes:
        host, space: the machine, and the name space of its process ids (a container has its own).
        boot: when the machine was started; ids mean nothing after another start.
        pid, started: of the process that has the lock; ids are used again, with another start.
        since: when the lock was taken, seconds since the epoch.
        run: the same for all processes of one run, after a restart of it, too.
    """

    host: str
    space: str
    boot: str
    pid: int
    started: int
    since: float
    run: str

    @classmethod
    def me(cls, run: str) -> Owner:
        place = socket.gethostname(), _space(), _boot()
        return cls(*place, os.getpid(), _started(os.getpid()), time.time(), run)

    def is_here(self) -> bool:
        """Whether its process could be seen from this one."""
        return (self.host, self.space) == (socket.gethostname(), _space())

    def is_gone(self, path: Path) -> str | None:
        """Why this owner of the lock `path` is no more; None: it may live."""
        if self.is_here():
            if self.boot != _boot():
                return f"{self.host} was started again"
            alive = psutil.pid_exists(self.pid) and _started(self.pid) == self.started
            return None if alive else f"process {self.pid} has ended"
        silent = _age(path)
        return f"{self.host} was silent for {silent:.0f} s" if silent > SILENT_S else None

    def is_this_process(self) -> bool:
        me = Owner.me(self.run)
        return self == replace(me, since=self.since)

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host}, since {since}"


def check_free(directory: Path, run: str = "") -> str | None:
    """What is to be told before this run takes the directory; nothing is changed.

    Raises:
        ConfigError: another run has it.
    """
    path = directory / FILE
    owner = _read(path)
    if owner is None or (run and owner.run == run) or owner.is_this_process():
        return None
    gone = owner.is_gone(path)
    if gone is None:
        age = "" if owner.is_here() else f"; it counts as gone after {SILENT_S:.0f} s of silence"
        raise ConfigError(
            f"another run writes to {directory}: {owner}",
            where="--output-dir",
            fix=f"name another directory, or end that run{age}",
        )
    return f"taking over {directory} from {owner}: {gone}"


def take(directory: Path, run: str, say: Callable[[str], None]) -> Callable[[], None]:
    """Make this run the owner of `directory`; returns what gives it back, which the end of the process does, too.

    Raises:
        ConfigError: another run has it.
    """
    path, me = directory / FILE, Owner.me(run or uuid.uuid4().hex)
    mine = directory / f"{FILE}.{me.host}.{me.pid}"
    mine.write_text(json.dumps(asdict(me)))
    try:
        for _ in range(3):
            with contextlib.suppress(FileExistsError):
                os.link(mine, path)  # whole or not at all, also on a shared file system
                return _hold(path, me)
            before = _read(path)
            if (note := check_free(directory, run)) is not None:
                say(note)
            _move_away(path, before)
    finally:
        mine.unlink()
    raise ConfigError(f"others take {directory} at the same time", where="--output-dir", fix="start again")


def _move_away(path: Path, gone: Owner | None) -> None:
    """Remove the lock of an owner that is gone; not that of one who took it meanwhile."""
    aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, aside)
        if _read(aside) != gone:
            with contextlib.suppress(FileExistsError):
                os.link(aside, path)
        aside.unlink()


def _hold(path: Path, me: Owner) -> Callable[[], None]:
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(BEAT_S):
            with contextlib.suppress(OSError):
                os.utime(path)

    def give_back() -> None:
        ended.set()
        atexit.unregister(give_back)
        with contextlib.suppress(OSError):
            if os.getpid() == me.pid and _read(path) == me:
                path.unlink()

    threading.Thread(target=beat, name="owner", daemon=True).start()
    atexit.register(give_back)
    return give_back


def _read(path: Path) -> Owner | None:
    try:
        return Owner(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError):
        # Somebody's, but nobody knows whose: only silence frees it.
        return Owner("an unknown host", "", "", 0, 0, 0.0, "")


def _age(path: Path) -> float:
    """Seconds since the last beat, by the clock of the file system."""
    probe = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        probe.touch()
        return probe.stat().st_mtime - path.stat().st_mtime
    except FileNotFoundError:
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
    """When a process was started, in ticks since the boot; 0 where there is none, or nobody says it."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0
