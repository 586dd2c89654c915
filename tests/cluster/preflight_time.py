"""How long the front end looks at many hosts before a run: `python -m tests.cluster.preflight_time [HOSTS]`.

The hosts are agents on this machine, started as ssh would start them but without it: its cores do the work of all the
machines, which real ones do at the same time.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from launcher.cli.job import Job
from launcher.cli.launch_flags import launch_parser
from launcher.cli.request import RunRequest
from launcher.cluster import preflight, rendezvous, runners
from launcher.cluster.node import Node
from launcher.cluster.node_group import NodeGroup


def measure(count: int) -> dict[str, float]:
    """Seconds until all have answered, until they have tried one another, and until the judgment."""
    with tempfile.TemporaryDirectory() as directory:
        hostfile = Path(directory, "hosts")
        hostfile.write_text("".join(f"w{i} slots=8\n" for i in range(count)))
        flags = launch_parser().parse_args(["--hostfile", str(hostfile), "--device", "cpu", "--no_python"])
        job = Job(RunRequest(flags, ["true"]), flags, None, None)
    command = runners.HERE.command(job.hosts[0], runners.RunnerOptions())
    node_group = NodeGroup([Node(host, i, command) for i, host in enumerate(job.hosts)], job.timeouts)
    began = time.monotonic()
    try:
        for _ in node_group.connect(node_group.nodes, job.hello):
            pass
        answered = time.monotonic()
        rendezvous.meet(node_group, rendezvous.RendezvousOptions(), lambda: None)
        met = time.monotonic()
        preflight.judge(node_group.nodes, preflight.NodeRequirements(job.needs, "cpu"))
        judged = time.monotonic()
    finally:
        node_group.close()
    return {"answered": answered - began, "tried one another": met - answered, "judged": judged - met}


def main(count: int) -> None:
    load = os.getloadavg()[0]
    times = measure(count)
    said = ", ".join(f"{what} {seconds:.2f} s" for what, seconds in times.items())
    print(
        f"{count} hosts: {sum(times.values()):.2f} s ({said}); load before: {load:.1f} on {os.cpu_count()} cores"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 64)
