"""`--dry_run`: prints the commands that would run on each host; nothing is started, submitted or written."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli import shares
from launcher.cli.flags import value_of
from launcher.cli.request import THIS_MACHINE
from launcher.cluster import gpus
from launcher.cluster.hostfile import Host
from launcher.cluster.node_spec import NodeSpec
from launcher.cluster.secret import shown

if TYPE_CHECKING:
    from launcher.cli.job import Job

WHO = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
FOUND = "FOUND_THERE"
"""Placeholder for values that only the nodes can determine."""


def rehearse(job: Job) -> Iterator[str]:
    """Yield the lines to print.

    Raises:
        ConfigError: the degrees do not multiply to the number of ranks.
    """
    hosts = [_host(job, host) for host in job.hosts]
    counts = [len(host.slots) for host in hosts]
    known = all(counts)
    if known:
        shares.places(job, sum(counts))
    directory = Path(
        value_of(job.run.arguments, "--output-dir") or f"runs/{job.run.name}-DATE-TIME"
    ).absolute()
    common = replace(
        shares.common(job, directory, _device(job, hosts)),
        world_size=sum(counts) if known else 0,
        nodes=len(hosts),
        master_addr=job.flags.master_addr
        or ("127.0.0.1" if len(hosts) == 1 else hosts[0].name.rpartition("@")[2]),
        master_port=job.flags.master_port or 0,
    )
    ranks = (
        f"{sum(counts)} {'rank' if sum(counts) == 1 else 'ranks'}"
        if known
        else "one rank for each device found there"
    )
    yield f"Nothing is started. On {len(hosts)} {'host' if len(hosts) == 1 else 'hosts'}, {ranks}, in {os.getcwd()}:"
    for host, count, first in zip(hosts, counts, accumulate(counts[:-1], initial=0), strict=True):
        yield ""
        yield f"{'this machine' if host.name == THIS_MACHINE else host.name}{_way(job, host)}"
        share = replace(common, ranks=count, first_rank=first)
        for local_rank in range(count or 1):
            name = f"rank {first + local_rank}" if known else "each rank"
            yield f"  {name}: {shlex.join(_command(job, share, local_rank, known))}"


def _host(job: Job, host: Host) -> Host:
    """Return the host with the slots it would use, as far as this machine can determine them."""
    if host.slots:
        return host
    count = 0
    if job.is_here(host) and job.device != "cpu":
        count = gpus.count()
    count = job.flags.num_gpus or count or (1 if job.is_here(host) or job.device == "cpu" else 0)
    return Host(host.name, tuple(range(count)))


def _device(job: Job, hosts: list[Host]) -> str:
    if job.device in ("cpu", "cuda"):
        return job.device
    if all(job.is_here(host) for host in hosts):
        return "cuda" if gpus.count() else "cpu"
    return FOUND


def _way(job: Job, host: Host) -> str:
    """Return how the host is reached."""
    if job.is_here(host):
        return ""
    if job.flags.no_ssh:
        return " (you start this command there, with that node's --node_rank)"
    *words, _ = job.command(host)  # the last word is the agent's source code
    return f" (an agent there starts the ranks: {shlex.join(words)} ...)"


def _command(job: Job, share: NodeSpec, local_rank: int, known: bool) -> list[str]:
    """Return `NAME=VALUE ... PROGRAM ARGUMENTS`."""
    identity = share.identity(local_rank)
    unknown = [] if share.master_port else ["MASTER_PORT"]
    if not known:
        unknown += ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]
    variables = {**job.asked, **share.environment, **{name: identity[name] for name in WHO}}
    variables |= dict.fromkeys(unknown, FOUND)
    values = [f"{name}={shown(name, value)}" for name, value in variables.items()]
    start = {"script": [sys.executable, "-u"], "module": [sys.executable, "-u", "-m"], "program": []}[
        share.kind
    ]
    return [*values, *start, share.target, *share.arguments_of(local_rank)]
