"""Processes that have torch imported before they start: most of the time of a `launch` is that import.

`python -m tests.cluster.zygote FD` imports what `launch` imports, then forks a process for every request that comes
through the socket FD. `Forked` is such a process, with the methods of subprocess.Popen that tests need.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MESSAGE = 1 << 20


class Forked:
    """`python -m MODULE ARGUMENTS`, forked from the zygote of this session; its output is text in pipes."""

    def __init__(self, module: str, arguments: list[str], cwd: Path, env: dict[str, str]) -> None:
        outputs = [os.pipe(), os.pipe()]
        self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        asked = json.dumps({"module": module, "arguments": arguments, "cwd": str(cwd), "env": env}).encode()
        passed = [other.fileno(), outputs[0][1], outputs[1][1]]
        socket.send_fds(_zygote(), [asked], passed)
        for fd in (outputs[0][1], outputs[1][1]):
            os.close(fd)
        other.close()
        self.pid: int = json.loads(self._control.recv(MESSAGE))
        self.returncode: int | None = None
        self._texts = ["", ""]
        self._readers = [
            threading.Thread(target=self._read, args=(i, read), daemon=True)
            for i, (read, _) in enumerate(outputs)
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, index: int, fd: int) -> None:
        with open(fd, encoding="utf-8", errors="replace") as pipe:
            self._texts[index] = pipe.read()

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; negative is a signal."""
        if self.returncode is None:
            self._control.settimeout(timeout)
            self.returncode = int(json.loads(self._control.recv(MESSAGE)))
            self._control.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """(stdout, stderr) when everybody who could write to them has ended."""
        self.wait(timeout)
        for reader in self._readers:
            reader.join(timeout)
            assert not reader.is_alive(), "something that was started still holds the output"
        return self._texts[0], self._texts[1]

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@cache
def _zygote() -> socket.socket:
    """The socket to a zygote, which ends when this process does."""
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "tests.cluster.zygote", str(its.fileno())]
    subprocess.Popen(command, cwd=ROOT, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL)
    its.close()
    return mine


def serve(requests: socket.socket) -> None:
    """Fork for each request until the other side is gone."""
    import launcher.cluster.local
    import launcher.config  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks that wait
    while True:
        asked, passed, _, _ = socket.recv_fds(requests, MESSAGE, 3)
        if not asked:
            return
        if os.fork() == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _watch(json.loads(asked), *passed)
        for fd in passed:
            os.close(fd)


def _watch(request: dict[str, Any], control_fd: int, out: int, err: int) -> None:
    """Fork the process, say its id, wait for it, say how it ended."""
    pid = os.fork()
    if pid == 0:
        os.close(control_fd)
        _become(request, out, err)
    os.close(out)
    os.close(err)
    with socket.socket(fileno=control_fd) as control:
        control.send(json.dumps(pid).encode())
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        control.send(json.dumps(code).encode())
    os._exit(0)


def _become(request: dict[str, Any], out: int, err: int) -> None:
    for fd, target in ((out, 1), (err, 2)):
        os.dup2(fd, target)
        os.close(fd)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[0] = request["cwd"]
    sys.argv = [request["module"], *request["arguments"]]
    code: Any = 0
    try:
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    except SystemExit as error:
        code = error.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
