"""System calls and programs: namespaces and processes."""

import ctypes
import os
import signal
import subprocess
from pathlib import Path

CANNOT = 77
NEWNS, NEWUTS, NEWIPC, NEWPID, NEWNET = (0x00020000, 0x04000000, 0x08000000, 0x20000000, 0x40000000)
NAMESPACES = {"ipc": NEWIPC, "uts": NEWUTS, "net": NEWNET, "pid": NEWPID, "mnt": NEWNS}
PR_SET_PDEATHSIG = 1
libc = ctypes.CDLL(None, use_errno=True)


class Failed(Exception):
    """An error to show to the user in one line. `code` is the exit code."""

    def __init__(self, message, code=1):
        super().__init__(message)
        self.code = code


def syscall(name, *args):
    if getattr(libc, name)(*args) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def die_with_parent():
    syscall("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def enter(pid, *names):
    """Move this process into namespaces of process pid ('pid': only its children)."""
    fds = {name: os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in names}
    for name in NAMESPACES:  # mnt last: it changes what /proc is
        if name in fds:
            syscall("setns", fds[name], NAMESPACES[name])
    for fd in fds.values():
        os.close(fd)


def sh(*argv, pid=None, names=("net",), check=True):
    """Run a system program, in the namespaces of process pid if given."""
    done = subprocess.run(
        [str(a) for a in argv],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        preexec_fn=pid and (lambda: enter(pid, *names)),
    )
    if check and done.returncode:
        raise Failed(f"{' '.join(map(str, argv))}: {done.stderr.strip()}")
    return done.stdout


def in_child(function):
    """Call function in a forked process, which may change namespaces; return whether it succeeded."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    try:
        os._exit(0 if function() is not False else 1)
    except BaseException as error:
        os.write(2, f"hosts: {error}\n".encode())
    os._exit(1)


def start_time(pid):
    """Return the start time of a process in clock ticks, or None if it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
