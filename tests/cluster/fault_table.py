"""Injects faults into runs on two simulated machines, for our and other launchers, and prints a table of the effects.

`python -m tests.cluster.fault_table [WAY ...] [--only TEXT]` has the requirements of the fixture `hosts`, and needs an
idle machine.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.test_faults import BEGINS, CHILD, WAITS
from tests.cluster.test_runners import PROGRAMS, environment_of
from tests.cluster.testbed import SCRIPT, Hosts, wait_for

HANGS = """
import contextlib
with contextlib.suppress(ImportError, AttributeError):  # with other launchers it only sleeps
    from launcher.monitor import flight_recorder
    flight_recorder.mine().show("all_gather of layers.0")
time.sleep(99)
"""
NAMES = ("head", "node1", "node2")
OF_SLURM = ("slurm", "munged")


@dataclass(frozen=True)
class Fault:
    """A row of the table: a fault caused by verbs of `hosts.py`, by signals, or by code in a rank."""

    name: str
    verbs: tuple[tuple[str, ...], ...] = ()
    rank_does: str = ""
    numbers: tuple[int, ...] = ()
    flags: tuple[str, ...] = ()
    """Flags of our launcher."""


FAULTS = (
    Fault("a rank raises", rank_does="raise ValueError('bad batch')"),
    Fault("a rank exits with 7", rank_does="sys.exit(7)"),
    Fault("SIGKILL of a rank", rank_does="os.kill(os.getpid(), 9)"),
    Fault("a rank hangs (--hang_timeout 5)", rank_does=HANGS, flags=("--hang_timeout", "5")),
    Fault("node2 is cut off", (("cut", "node2"),)),
    Fault("node2's cable is unplugged", (("unplug", "node2"),)),
    Fault("node2 is frozen", (("freeze", "node2"),)),
    Fault("every process of node2 is killed, sshd too", (("kill", "node2"),)),
    Fault(
        "node2's agent is killed",
        (("exec", "node2", "--", "sh", "-c", "kill -9 $(ps -o ppid= -p $(cat ready2))"),),
    ),
    Fault("the front end is cut off", (("cut", "head"),)),
    Fault("kill -9 of the front end", (("exec", "head", "--", "pkill", "-9", "-f", "FRONT_END"),)),
    Fault("Ctrl-C", numbers=(signal.SIGINT,)),
    Fault("SIGTERM", numbers=(signal.SIGTERM,)),
    Fault("Ctrl-C while node2 is cut off", (("cut", "node2"),), numbers=(signal.SIGINT,)),
    Fault("the same, with a second Ctrl-C", (("cut", "node2"),), numbers=(signal.SIGINT, signal.SIGINT)),
)


@dataclass(frozen=True)
class Way:
    """How a run of two ranks on each machine is started.

    Args:
        command: returns the command to run on the head, given a hostfile and the flags of a fault.
        front_end: a pattern that matches its process, for pkill.
        limit_s: how long to wait for the end of the run.
        clean_s: how long to wait, for each machine, until no process is left.
    """

    command: Callable[[str, tuple[str, ...]], list[str]]
    front_end: str = "^[^ ]*python.* -m launcher.cli.main"
    limit_s: float = 60
    clean_s: float = 30
    children: bool = True
    """Each rank has a child in its own session. A remaining child would keep ssh waiting."""


OURS = (sys.executable, "-m", "launcher.cli.main", "--device", "cpu")
SCRIPT_OF_RANKS = ("script.py", "--output-dir", "out")


def _ours(runner: str) -> Way:
    flags = (*OURS, "--launcher", runner)
    return Way(lambda hostfile, more: [*flags, "--hostfile", hostfile, *more, *SCRIPT_OF_RANKS])


def _in_allocation(hostfile: str, more: tuple[str, ...]) -> list[str]:
    return ["salloc", "-Q", "-N2", *OURS, "--launcher", "slurm", "--num_gpus", "2", *more, *SCRIPT_OF_RANKS]


def _deepspeed(hostfile: str, more: tuple[str, ...]) -> list[str]:
    program = str(Path(sys.executable).with_name("deepspeed"))
    return [program, "--hostfile", hostfile, "--master_addr", "node1", *SCRIPT_OF_RANKS]


def _torchrun(hostfile: str, more: tuple[str, ...]) -> list[str]:
    """Return the usual command: torchrun on each node over ssh, all from one shell."""
    flags = "--nnodes 2 --nproc-per-node 2 --master-addr node1 --master-port 29500"
    program = f"{Path(sys.executable).with_name('torchrun')} {flags}"
    line = "ssh node{0} 'cd {1} && {2} --node-rank {3} script.py'"
    typed = [line.format(rank + 1, Path(hostfile).parent, program, rank) for rank in (0, 1)]
    return ["bash", "-c", f"{typed[0]} & {typed[1]} & wait -n; one=$?; wait; exit $one"]


WAYS = {
    **{runner: _ours(runner) for runner in ("ssh", "pdsh", "openmpi", "mpich")},
    "slurm": Way(_in_allocation),
    "deepspeed": Way(_deepspeed, "bin/deepspeed", limit_s=20, clean_s=2, children=False),
    "torchrun": Way(_torchrun, "^bash -c ssh node1", limit_s=20, clean_s=2, children=False),
}


def measure(hosts: Hosts, fault: Fault, name: str) -> str:
    """Inject a fault, and return its row of the table."""
    way = WAYS[name]
    cwd = Path(tempfile.mkdtemp(prefix="faults-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, cwd, ignore_errors=True)
        (cwd / "script.py").write_text(BEGINS + (CHILD if way.children else "") + WAITS)
        said = cwd / "said"
        command = way.command(hosts.hostfile(cwd, slots=2), fault.flags)
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), "exec", "head", "--", *command],
            cwd=cwd,
            env={**hosts.env, "DS_ACCELERATOR": "cpu", "PDSH_RCMD_TYPE": "ssh", **environment_of(name, cwd)},
            stdin=subprocess.DEVNULL,
            stdout=stack.enter_context(said.open("wb")),
            stderr=subprocess.STDOUT,
        )
        stack.callback(process.kill)
        ready = [cwd / f"ready{rank}" for rank in range(4)]
        wait_for(lambda: process.poll() is not None or all(p.exists() for p in ready), "the ranks", 90)
        assert process.poll() is None, said.read_text()
        before = said.stat().st_size
        if fault.rank_does:
            (cwd / "fail3").write_text(fault.rank_does)
        since = time.monotonic()
        for verb in fault.verbs:
            words = [word.replace("ready2", str(cwd / "ready2")) for word in verb]
            hosts(*[word.replace("FRONT_END", way.front_end) for word in words])
        for number in fault.numbers:
            process.send_signal(number)
            time.sleep(0.1)
        ended = _took(process, since, way.limit_s)
        text = said.read_bytes()[before:].decode(errors="replace").replace(str(cwd), "...")
        if any(verb[0] == "freeze" for verb in fault.verbs):
            hosts("heal")
        left = {node: _left(hosts, node, way.clean_s) for node in NAMES}
        clean = time.monotonic() - since
        remains = ", ".join(f"{len(lines)} on {node}" for node, lines in left.items() if lines)
        clean_after = f"> {clean:.0f}" if remains else f"{clean:.1f}"
        code = "" if process.poll() is None else process.returncode
        return f"| {fault.name} | {ended} | {code} | {clean_after} | {remains or 'nothing'} | {_told(text)} |"


def _took(process: subprocess.Popen[bytes], since: float, limit_s: float) -> str:
    try:
        process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"> {limit_s:.0f}"
    return f"{time.monotonic() - since:.1f}"


def _left(hosts: Hosts, node: str, limit_s: float) -> list[str]:
    deadline = time.monotonic() + limit_s
    while True:
        lines = [line for line in hosts.left(node) if not any(word in line for word in OF_SLURM)]
        if not lines or time.monotonic() > deadline:
            return lines
        time.sleep(0.1)


def _told(text: str) -> str:
    """Return our message; for other launchers, the first line that reports an error."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in text.splitlines()]
    ours = [line.removeprefix("error: ") for line in lines if line.startswith("error:")]
    wrong = re.compile(
        r"\w+Error\b|SIG[A-Z]+|exit ?code|return code|connection|timed out|no route|refused", re.I
    )
    found = [*ours, *(line for line in lines if wrong.search(line))]
    return found[0].replace("|", "/")[:160] if found else ""


def main(ways: list[str], only: str) -> None:
    for name in ways:
        print(f"\n### {name}, load {os.getloadavg()[0]:.1f}\n")
        print(
            "| fault | ended after, s | exit code | all clean after, s | remaining processes | message |\n"
            "|---|---|---|---|---|---|"
        )
        for fault in FAULTS:
            if re.search(only, fault.name):
                # New machines each time: some faults leave processes behind, or do not heal.
                folder = Path(tempfile.mkdtemp(prefix="faults-hosts-"))
                hosts = Hosts(folder)
                hosts("up", 2)
                try:
                    if name == "slurm":
                        script = ["sh", str(SCRIPT.parent / "slurm")]
                        subprocess.run(script, env=hosts.env, check=True, timeout=60)
                    print(measure(hosts, fault, name), flush=True)
                finally:
                    hosts("down")
                    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ways", nargs="*", help=", ".join(WAYS))
    parser.add_argument("--only", default="", help="faults whose name matches this pattern")
    asked = parser.parse_args()
    found = [name for name, program in PROGRAMS.items() if shutil.which(program)]
    main(asked.ways or ["ssh", *found], asked.only)
