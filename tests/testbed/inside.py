"""Run commands on a simulated machine, and find its processes."""

import contextlib
import os
import signal
from pathlib import Path

from tests.testbed.kernel import NAMESPACES, die_with_parent, enter, in_child


def run_inside(host, argv, terminal=False):
    """Run argv on a machine, forward signals to it, and return its exit code."""
    passed = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
    signal.pthread_sigmask(signal.SIG_BLOCK, passed | {signal.SIGCHLD})
    folder = os.getcwd()
    enter(host["init"], *NAMESPACES)
    os.chdir(folder if os.path.isdir(folder) else "/")
    child = os.fork()
    if child == 0:
        try:
            die_with_parent()
            if not terminal:
                os.setpgid(0, 0)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, passed | {signal.SIGCHLD})
            os.execvp(argv[0], argv)
        except OSError as error:
            os.write(2, f"hosts: {argv[0]}: {error.strerror}\n".encode())
        os._exit(127)
    while True:
        got = signal.sigwaitinfo(passed | {signal.SIGCHLD})
        if got.si_signo == signal.SIGCHLD:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
        elif not (terminal and got.si_code > 0):  # > 0: the terminal sent it to both
            whole = got.si_signo == signal.SIGINT and not terminal
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if whole else os.kill)(child, got.si_signo)


def started_inside(host, program):
    return run_inside(host, [program]) == 0


def inhabitants(host):
    """Return (pid outside, pid inside, command) of a machine's processes, except init."""

    def space(pid):
        return os.stat(f"/proc/{pid}/ns/pid").st_ino

    home = space(host["init"])
    for entry in Path("/proc").iterdir():
        try:
            if not entry.name.isdigit() or space(entry.name) != home:
                continue
            status = (entry / "status").read_text()
            inside = int(status.split("NSpid:")[1].splitlines()[0].split()[-1])
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except OSError:
            continue
        if inside != 1 and "\nState:\tZ" not in status:
            yield int(entry.name), inside, line or status.split()[1]


def sshd_of(host):
    """Return the outside process id of the machine's listening sshd, or None if there is none."""
    for pid, _, line in inhabitants(host):
        if line.startswith("sshd:") and "[listener]" in line:
            return pid


def signal_all(host, signum):
    """Send a signal to every process of a machine except its init, all at once."""

    def send():
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signum)

    def inside():
        enter(host["init"], "pid")  # from here on for children only
        return in_child(send)

    in_child(inside)
