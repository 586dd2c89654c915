"""Breaks runs on two pretend machines with each runner, measures what follows, and prints a table.

`python -m tests.cluster.fault_table [RUNNER ...]`; needs what the fixture `hosts` needs, and an idle machine.
"""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.test_faults import running
from tests.cluster.test_runners import PROGRAMS, environment_of
from tests.cluster.testbed import Hosts, ended

HANGS = "from launcher.monitor import beacon; beacon.mine().show('all_gather of layers.0'); time.sleep(99)"


@dataclass(frozen=True)
class Fault:
    """A row: what happens, by a verb of `hosts.py`, a signal, or what a rank does."""

    name: str
    verbs: tuple[tuple[str, ...], ...] = ()
    rank_does: str = ""
    number: int = 0
    flags: tuple[str, ...] = ()


FRONT_END = ("exec", "head", "--", "pkill", "-9", "-f", "^[^ ]*python.* -m launcher.cli.main")
FAULTS = (
    Fault("a rank raises", rank_does="raise ValueError('bad batch')"),
    Fault("a rank exits with 7", rank_does="sys.exit(7)"),
    Fault("SIGKILL of a rank", rank_does="os.kill(os.getpid(), 9)"),
    Fault("a rank hangs (--hang_timeout 5)", rank_does=HANGS, flags=("--hang_timeout", "5")),
    Fault("node2 is cut off", (("cut", "node2"),)),
    Fault("node2's cable is out", (("unplug", "node2"),)),
    Fault("node2 is frozen", (("freeze", "node2"),)),
    Fault("every process of node2 is killed, sshd too", (("kill", "node2"),)),
    Fault(
        "node2's agent is killed",
        (("exec", "node2", "--", "sh", "-c", "kill -9 $(ps -o ppid= -p $(cat ready2))"),),
    ),
    Fault("the front end is cut off", (("cut", "head"),)),
    Fault("kill -9 of the front end", (FRONT_END,)),
    Fault("Ctrl-C", number=signal.SIGINT),
    Fault("SIGTERM", number=signal.SIGTERM),
    Fault("Ctrl-C while node2 is cut off", (("cut", "node2"),), number=signal.SIGINT),
)


def measure(hosts: Hosts, fault: Fault, runner: str) -> str:
    """A row of the table."""
    cwd = Path(tempfile.mkdtemp(prefix="faults-"))
    env = environment_of(runner, cwd)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, cwd, ignore_errors=True)
        stack.callback(hosts, "heal")
        process = stack.enter_context(running(hosts, cwd, "--launcher", runner, *fault.flags, env=env))
        if fault.rank_does:
            (cwd / "fail3").write_text(fault.rank_does)
        since = time.monotonic()
        for verb in fault.verbs:
            hosts(*[word.replace("ready2", str(cwd / "ready2")) for word in verb])
        if fault.number:
            process.send_signal(fault.number)
        end = ended(process, since, limit_s=60)
        if any(verb[0] == "freeze" for verb in fault.verbs):
            hosts("heal")
        for name in ("head", "node1", "node2"):
            hosts.wait_until_empty(name, limit_s=30)
        clean = time.monotonic() - since
        left = [line for name in ("head", "node1", "node2") for line in hosts.left(name)]
        said = next((line for line in end.errors.splitlines() if line.startswith("error:")), "")
        said = said.removeprefix("error: ").replace(str(cwd), "...").replace("|", "/")
        what = "nothing" if not left else f"{len(left)} processes"
        return f"| {fault.name} | {end.took_s:.1f} | {end.code} | {clean:.1f} | {what} | {said} |"


def main(runners: list[str]) -> None:
    hosts = Hosts(Path(tempfile.mkdtemp(prefix="faults-hosts-")))
    hosts("up", 2)
    try:
        for runner in runners:
            print(
                f"\n## {runner}\n\n| fault | ended after, s | exit code | all clean after, s | left | said |"
            )
            print("|---|---|---|---|---|---|")
            for fault in FAULTS:
                print(measure(hosts, fault, runner), flush=True)
    finally:
        hosts("down")
        shutil.rmtree(hosts.folder, ignore_errors=True)


if __name__ == "__main__":
    found = [name for name, program in PROGRAMS.items() if shutil.which(program)]
    main(sys.argv[1:] or ["ssh", *found])
