"""The first code of every rank: `python -u rank.py {script,module,program} NAME [arguments]`.

Ties the lifetime of the rank to the launcher's, merges stderr into stdout (one log in true order), runs the
script, and records how it failed in the error file of torch elastic (TORCHELASTIC_ERROR_FILE). It is run by
its path and uses only the standard library: it must start fast and import nothing of this package.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import faulthandler
import gc
import io
import json
import os
import runpy
import signal
import sys
import time
import traceback
import types
from typing import NoReturn, TextIO

PR_SET_PDEATHSIG = 1  # linux/prctl.h
SHOW_STACKS = signal.SIGRTMIN + 7  # SIGUSR1 and SIGUSR2 are left to the script
EXIT_ALLOWANCE_S = 3  # a failed rank that hangs in its threads or exit handlers is killed after this time


def main() -> None:
    kind, name, *arguments = sys.argv[1:]
    die_with_launcher()
    os.dup2(1, 2)
    bind_cores()
    if kind == "program":
        become(name, arguments)
    faulthandler.enable()
    stacks = os.environ.get("LAUNCHER_STACKS")
    if stacks:
        file = open(stacks, "w")  # noqa: SIM115 - open as long as this process lives
        faulthandler.register(SHOW_STACKS, file=file, all_threads=True)
    failed_with: list[int] = []
    atexit.register(leave, failed_with)  # registered first, called last
    sys.argv = [name, *arguments]
    # As set by `python script.py` and `python -m module`.
    sys.path[0] = os.getcwd() if kind == "module" else os.path.dirname(os.path.abspath(name))
    try:
        if kind == "module":
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(name, run_name="__main__")
    except SystemExit as error:
        if error.code not in (None, 0):
            record("exit", error)
            failed_with.append(error.code if isinstance(error.code, int) else 1)
        raise
    except BaseException as error:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(EXIT_ALLOWANCE_S)
        ours = any(base.__name__ == "LauncherError" for base in type(error).__mro__)
        kind = str(getattr(error, "kind", "mendable")) if ours else "exception"
        record(kind, error)
        failed_with.append(2 if kind == "mendable" else 1)
        sys.exit(failed_with[0])


def become(program: str, arguments: list[str]) -> NoReturn:
    """Replace this process by a program. If that fails, record why."""
    try:
        os.execvp(program, [program, *arguments])
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        fixes = {
            errno.EACCES: f"chmod +x {program}",
            errno.ENOENT: "make sure that it and its interpreter are on this machine, on PATH or given by path",
            errno.ENOEXEC: "add its interpreter as the first line: #!/bin/sh",
        }
        fix = fixes.get(getattr(error, "errno", 0), "pass an executable program")
        text = f"the program {program} cannot be run: {why}\n  where: --no_python\n  fix: {fix}"
        record("mendable", OSError(text))
        os._exit(2)


def leave(failed_with: list[int]) -> None:
    """End this rank after all exit handlers have run, without tearing down torch.

    The teardown takes seconds on a busy machine, and in a failed rank gloo may wait for the other ranks. It
    is also a race: a thread that returns from C++ (gloo's, or a daemon thread in an operation) while the
    interpreter shuts down is ended by Python in the middle of C++, which then calls std::terminate: exit code
    134 after a successful run.

    Args:
        failed_with: the exit code; empty if the rank has not failed.
    """
    if not failed_with:
        if "torch" not in sys.modules:
            return
        say_last()
    for stream in (sys.stdout, sys.stderr):
        flush(stream)
    os._exit(failed_with[0] & 0xFF if failed_with else 0)


def say_last() -> None:
    """Delete the objects of the script and flush files, as Python does at exit."""
    if "threading" in sys.modules:  # errors of daemon threads are irrelevant now
        sys.modules["threading"].excepthook = lambda *_: None  # type: ignore[attr-defined]
    for module in [found for found in gc.get_objects() if type(found) is types.ModuleType]:
        names = vars(module)
        if names.get("__name__") == "__main__" and module is not sys.modules["__main__"]:
            for name in [name for name in names if name != "__builtins__"]:
                names[name] = None
    gc.collect()
    for found in gc.get_objects():
        if issubclass(type(found), io.IOBase):
            flush(found)


def flush(file: io.IOBase | TextIO) -> None:
    with contextlib.suppress(Exception):
        file.flush()


def die_with_launcher() -> None:
    """Ask the kernel to kill this rank when the launcher dies, however it dies (Linux only)."""
    launcher = int(os.environ["LAUNCHER_PID"])
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:  # it died before the prctl call
        sys.exit(1)


def bind_cores() -> None:
    cores = os.environ.get("LAUNCHER_CORES")
    if cores:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})


def record(kind: str, error: BaseException) -> None:
    """Write how this rank failed, in torch elastic's format with our `kind` and exact `time` added."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    now = time.time()
    text = str(error) if kind != "exception" else f"{type(error).__name__}: {error}"
    extra = {"py_callstack": _script_traceback(error), "timestamp": str(int(now)), "time": now, "kind": kind}
    # Renamed into place: the launcher may kill this rank at any moment and must never read a partial file.
    # Like the log, the file is readable by the user only. The launcher detects a full disk on its own.
    with contextlib.suppress(OSError):
        with open(
            f"{path}.tmp", "w", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)
        ) as file:
            json.dump({"message": {"message": text, "extraInfo": extra}}, file)
        os.replace(f"{path}.tmp", path)


def _script_traceback(error: BaseException) -> str:
    """Return the traceback without the frames of this file and of runpy."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in (
        __file__,
        runpy.__file__,
        "<frozen runpy>",
    ):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


if __name__ == "__main__":
    main()
