"""`launch report` and `launch ssh`: a report about all hosts, and a shell command on all of them."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from launcher.cli.job import Job
from launcher.cli.launch_flags import launch_parser, split_argv
from launcher.cli.request import RunRequest
from launcher.cluster.facts import PACKAGES
from launcher.cluster.hostfile import Host
from launcher.cluster.node import Node
from launcher.cluster.secret import masked
from launcher.errors import ConfigError, printable

SSH_HELP = """\
usage: launch ssh [-H HOSTS] [launcher flags] COMMAND

Runs a shell command on every host at once; each line of output starts with the host's name.
Exits with 0, or with the largest exit code. Example: launch ssh -H hosts 'nvidia-smi -L'"""
REPORT_HELP = """\
usage: launch report [-H HOSTS] [launcher flags]

Prints versions, memory, devices and addresses of every host. Exits with 1 if one does not answer."""
ROWS = ("host", "python", "executable", "cores", "memory", "gpus", "mask", "addresses")


def report(argv: Sequence[str]) -> int:
    """Run `launch report [launcher flags]`: print a table for every host; return 1 if one does not answer."""
    if {"-h", "--help"} & {*argv}:
        print(REPORT_HELP)
        return 0
    job = _job(argv)
    front_end = job.front_end()
    nodes = front_end.node_group.nodes
    try:
        for _ in front_end.node_group.connect(nodes, job.hello):
            pass
        for node in nodes:
            print(printable(masked("\n".join(_lines(node)))))
    except KeyboardInterrupt:
        return 130
    finally:
        front_end.node_group.close()
    return 1 if any(node.facts is None for node in nodes) else 0


def ssh(argv: Sequence[str]) -> int:
    """Run `launch ssh [launcher flags] COMMAND`: a shell command on all hosts in parallel.

    Each output line is prefixed with the host's name.

    Returns:
        the largest exit code.
    """
    own, words = split_argv(launch_parser(), argv)
    if {"-h", "--help"} & {*own, *words[:1]}:
        print(SSH_HELP)
        return 0
    if not words:
        raise ConfigError("launch ssh needs a command", fix="launch ssh -H hosts 'nvidia-smi -L'")
    job = _job(own)
    with ThreadPoolExecutor(job.timeouts.fan_out) as pool:
        return max(pool.map(lambda host: _run(job, host, " ".join(words)), job.hosts))


def _job(argv: Sequence[str]) -> Job:
    """Return a job with the hosts that the launcher's flags select, without starting anything on them."""
    flags = launch_parser().parse_args([*argv, "--no_python"])
    return Job(RunRequest(flags, ["true"]), flags, None, None)


def _run(job: Job, host: Host, line: str) -> int:
    name = printable(f"{host.name}: ")
    process = subprocess.Popen(
        job.shell_command(host, line),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    for text in process.stdout:
        print(name + text.decode(errors="replace").rstrip("\n"), flush=True)
    return process.wait()


def _lines(node: Node) -> list[str]:
    if node.facts is None:
        return [f"{node.name}", f"  not ready   {node.lost}"]
    facts = {**node.facts, "memory": f"{node.facts['memory'] / 2**30:.1f} GiB free"}
    facts |= {"addresses": ", ".join(node.facts["addresses"]), "mask": node.facts["mask"] or "none"}
    rows = [(name, facts[name]) for name in ROWS]
    rows += [(name, facts["versions"][name] or "not installed") for name in PACKAGES]
    rows += [("clock", f"{facts['clock'] - facts['arrived']:+.1f} s relative to this machine")]
    return [node.name, *(f"  {name:<12}  {value}" for name, value in rows)]
