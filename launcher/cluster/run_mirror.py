"""`RunMirror`: local copies of a run's files on other hosts, kept up to date for `launch top --hostfile`.

Each host of the hostfile sends its files over ssh (`run_files.py`). The run is the newest one among all
hosts; the other hosts have logs of its ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from launcher.cluster import run_files, runners
from launcher.cluster.hostfile import Host
from launcher.cluster.run_status import FILE
from launcher.errors import ConfigError, printable
from launcher.files import replace_text

ANSWER_S = 15.0
"""How long to wait for the hosts."""
LONGEST_LINE = 1 << 26


class RunMirror:
    """Copies of a run's files; use it as a context manager.

    Args:
        run: its directory on the host where `launch` was typed; None: the newest run below the same directory
            as the current one.
    """

    def __init__(self, hosts: Sequence[Host], options: runners.RunnerOptions, run: str | None) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="launch-top-")
        self.directory = Path(self._temporary.name)
        (self.directory / "logs").mkdir()
        self._changed, self._closed = threading.Condition(), False
        code = Path(run_files.__file__).read_text(encoding="utf-8")
        hello = {"code": code, "directory": os.getcwd(), "run": run}
        self._of: _Host | None = None  # the host that has the run
        self._hosts = [_Host(self, host, options) for host in hosts]
        for each in self._hosts:
            each.start(hello)

    @property
    def status(self) -> Path:
        """Return the copy of the run's status."""
        return self.directory / "logs" / FILE

    @property
    def called(self) -> str:
        """Return the host and directory of the run."""
        return "" if self._of is None else printable(f"{self._of.name}:{self._of.directory}")

    def wait(self) -> None:
        """Wait until the hosts have answered, and the status of the newest run among them is copied.

        Raises:
            ConfigError: no host has a run.
        """
        ends = time.monotonic() + ANSWER_S
        with self._changed:
            while not all(host.answered for host in self._hosts) and (left := ends - time.monotonic()) > 0:
                self._changed.wait(left)
            there = [host for host in self._hosts if host.directory and run_files.STATUS in host.files]
            if there:
                self._of = max(there, key=lambda host: host.written)
                self._write(self._of)
                for host in self._hosts:
                    host.order({"run": self._of.directory})
        if self._of is None:
            why = "; ".join(f"{host.name}: {host.problem or 'no run'}" for host in self._hosts[:4])
            raise ConfigError(
                f"no run was found on the hosts of the hostfile ({printable(why)})",
                where="launch top --hostfile",
                fix="pass the run's directory as a path on the host where `launch` was started",
            )

    def ask_stacks(self) -> None:
        """Request that the run write the stacks of its ranks."""
        if self._of is not None:
            self._of.order({"stacks": True})

    def ask_log(self, rank: int) -> None:
        """Request the end of a rank's log from the host that has it."""
        for host in self._hosts:
            host.order({"log": rank})

    def take(self, host: _Host, message: Mapping[str, Any]) -> None:
        """Process a message of a host. Files of the run are copied only from the host that has it."""
        with self._changed:
            if self._closed:
                return
            if message["is"] == "run":
                host.directory = None if message["directory"] is None else str(message["directory"])
                host.written = float(message["written"])
            elif message["is"] == "sent":  # all present files have been sent
                host.answered = True
            elif message["is"] == "log":
                replace_text(
                    self.directory / "logs" / f"rank{int(message['rank'])}.log", str(message["text"])
                )
            elif message["is"] == "file" and message["name"] in run_files.SENT:
                host.files[message["name"]] = str(message["text"])
            self._write(host)
            self._changed.notify_all()

    def _write(self, host: _Host) -> None:
        if host is self._of:
            for name, text in host.files.items():
                replace_text(self.directory / name, text)
            host.files.clear()

    def lose(self, host: _Host, why: str) -> None:
        """Record that a host sends nothing more."""
        with self._changed:
            host.answered, host.problem = True, why
            self._changed.notify_all()

    def __enter__(self) -> RunMirror:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for host in self._hosts:
            host.close()
        with self._changed:  # no thread may write to the directory any more
            self._closed = True
            self._temporary.cleanup()


class _Host:
    """The connection to a host.

    Attributes:
        answered: it has reported whether it has a run, or is lost.
        directory: of the newest run on the host; None: there is none.
        files: files that were received, but not written yet.
    """

    def __init__(self, mirror: RunMirror, host: Host, options: runners.RunnerOptions) -> None:
        self._mirror, self.name, self.answered, self.problem = mirror, host.name, False, ""
        self.directory: str | None = None
        self.written = 0.0
        self.files: dict[str, str] = {}
        self._process = subprocess.Popen(
            runners.command("ssh", host, options),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C must reach only the viewer
        )

    def start(self, hello: Mapping[str, Any]) -> None:
        """Send the first message and start listening."""
        self.order(hello)
        threading.Thread(target=self._listen, daemon=True).start()

    def order(self, order: Mapping[str, Any]) -> None:
        """Send one message; do nothing if the host is lost."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()

    def _listen(self) -> None:
        assert self._process.stdout is not None and self._process.stderr is not None
        why = ""
        try:
            while line := self._process.stdout.readline(LONGEST_LINE):
                if line.startswith(b"{"):  # anything else is a greeting of the shell
                    self._mirror.take(self, json.loads(line))
        except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError, OSError) as error:
            why = f"it sent an invalid message: {error}"
            self._process.kill()
        last = self._process.stderr.read(1 << 16).decode(errors="replace").strip().splitlines()
        self._mirror.lose(self, why or (last[-1] if last else "the connection has ended"))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
