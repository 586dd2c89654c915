"""The run that a command line requests: program, hosts and output directory."""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from launcher.cli.recipes import DEFAULT_RECIPE, check_name, find_recipe
from launcher.cluster import join
from launcher.cluster.hostfile import MOST_SLOTS, TOO_MANY, Host, check_size, read_hostfile
from launcher.cluster.selection import first_slots, select
from launcher.errors import ConfigError

THIS_MACHINE = "localhost"
JOINING_PORT = 29500  # DeepSpeed's default
MANY = 100
"""Default number of restarts with `--elastic_training`, as in DeepSpeed."""


class RunRequest:
    """The program to run, from the part of the command line that starts with the recipe's name."""

    def __init__(self, flags: argparse.Namespace, recipe: list[str]) -> None:
        name, *self.arguments = recipe or [DEFAULT_RECIPE]
        self.kind, self.target, self.is_ours = "script", name, False
        self.name = Path(name).stem
        if flags.module or flags.no_python:
            self.kind = "module" if flags.module else "program"
            check_name(name, self.kind)
        else:
            path, self.is_ours = find_recipe(name)
            self.target = str(path)

    @property
    def asks_for_help(self) -> bool:
        """Return whether the arguments ask a script for `--help`, which one plain process can print."""
        return self.kind == "script" and bool({"-h", "--help"} & set(self.arguments))


def hosts_of(flags: argparse.Namespace, runner: str) -> list[Host]:
    """Return the hosts of the hostfile or of the scheduler's allocation; else this machine."""
    if flags.hostfile:
        return read_hostfile(flags.hostfile)
    if flags.no_ssh and flags.num_nodes:
        return [Host(f"node{rank}", ()) for rank in range(flags.num_nodes)]
    allocated = os.environ.get("SLURM_JOB_NODELIST")
    if runner == "slurm" and allocated:
        asked = subprocess.run(
            ["scontrol", "show", "hostnames", allocated], capture_output=True, text=True, check=False
        )
        if asked.returncode == 0:
            return [Host(name, ()) for name in asked.stdout.split()]
    if flags.launcher:
        raise ConfigError(
            f"--launcher {flags.launcher} requires a list of hosts",
            fix="pass --hostfile PATH" + (", or start inside an allocation" if runner == "slurm" else ""),
        )
    return [Host(THIS_MACHINE, ())]


def joining_place(flags: argparse.Namespace) -> tuple[str, int]:
    """Return the address and port at which nodes that join on their own (`--no_ssh`) connect to node 0.

    Raises:
        ConfigError: `--master_addr` or `--node_rank` is missing, or the node rank is out of range.
    """
    if flags.master_addr is None or flags.node_rank is None:
        raise ConfigError(
            "--no_ssh requires --node_rank and --master_addr",
            fix="start the same command on every node: --no_ssh --node_rank R --master_addr ADDRESS_OF_NODE_0",
        )
    if flags.num_nodes is not None:
        check_node_rank(flags, flags.num_nodes)
    return flags.master_addr, flags.master_port or JOINING_PORT


def check_node_rank(flags: argparse.Namespace, hosts: int) -> None:
    """Raise `ConfigError` if `--node_rank` is out of range: the run would wait forever for the real node."""
    if flags.node_rank is not None and flags.node_rank >= hosts:
        raise ConfigError(
            f"--node_rank {flags.node_rank}: the number of hosts is {hosts}",
            fix=f"number the nodes from 0 to {hosts - 1}, or increase --num_nodes",
        )


def joining_token(flags: argparse.Namespace) -> str:
    """Return the token with which nodes that join on their own authenticate; ranks do not get it.

    Raises:
        ConfigError: there is no token, or it is easy to guess.
    """
    token = join.token_of(os.environ, flags.token_file, insecure=flags.insecure, makes=not flags.node_rank)
    os.environ.pop(join.TOKEN, None)
    return token


def restarts_of(flags: argparse.Namespace) -> tuple[int, int | None]:
    """Return the maximum number of restarts and the minimum number of nodes (None: all nodes)."""
    if not flags.elastic_training:
        return flags.max_restarts or 0, flags.min_nodes
    return MANY if flags.max_restarts is None else flags.max_restarts, flags.min_nodes or 1


def check_bounds(flags: argparse.Namespace, hosts: int) -> None:
    """Raise `ConfigError` if --min_nodes, --max_nodes, --node_rank or --num_gpus do not fit the hosts."""
    if flags.no_ssh:
        check_node_rank(flags, hosts)
    if flags.num_gpus is not None:
        if flags.num_gpus > MOST_SLOTS:
            place = "this machine" if hosts == 1 else "each host"
            raise ConfigError(
                f"{flags.num_gpus:,} ranks on {place}: {TOO_MANY}", where="--num_gpus", fix="write fewer"
            )
        check_size(hosts, hosts * flags.num_gpus, "--num_nodes, --num_gpus")
    for name, bound in (("--min_nodes", flags.min_nodes), ("--max_nodes", flags.max_nodes)):
        if bound is not None and bound > hosts:
            raise ConfigError(
                f"{name} {bound}: the number of hosts is {hosts}",
                fix="request fewer hosts, or list more in --hostfile",
            )
    restarts, least = restarts_of(flags)
    if flags.on_straggler == "restart-without" and (
        not restarts or min(least or hosts, flags.max_nodes or hosts) >= hosts
    ):
        raise ConfigError(
            "no host can be excluded: "
            + ("restarts are disabled" if not restarts else f"all {hosts} are needed"),
            where="--on_straggler restart-without",
            fix="add --max_restarts N"
            if not restarts
            else "list more hosts, or lower --min_nodes or --max_nodes",
        )
    if flags.min_nodes is not None and flags.max_nodes is not None and flags.min_nodes > flags.max_nodes:
        raise ConfigError(
            f"--min_nodes {flags.min_nodes} is above --max_nodes {flags.max_nodes}",
            fix="swap the two",
        )


def selected(hosts: list[Host], flags: argparse.Namespace) -> list[Host]:
    """Return the hosts and slots that the flags select.

    Without a hostfile, slots are known only later, when --num_nodes has already been applied.
    """
    late = not flags.hostfile
    filtered = flags.include or flags.exclude
    chosen = select(
        hosts,
        include=flags.include,
        exclude=flags.exclude,
        num_nodes=flags.num_nodes if filtered or not late else None,
        num_gpus=None if late else flags.num_gpus,
    )
    return [first_slots(host, flags.num_gpus) for host in chosen] if late and flags.num_gpus else chosen


def _new_directory(base: Path) -> Path:
    """Create and return `base`, or the first free one of `base-2`, ...: runs may start in the same second."""
    for number in itertools.count(1):
        candidate = base if number == 1 else base.with_name(f"{base.name}-{number}")
        with suppress(FileExistsError):
            candidate.mkdir()
            return candidate
    raise AssertionError("counting does not end")


def run_directory(wanted: str | None, recipe: str) -> Path:
    """Create the run's directory: `wanted`, or a new `runs/<recipe>-<date>-<time>`."""
    try:
        if wanted is not None:
            Path(wanted).mkdir(parents=True, exist_ok=True)
            return Path(wanted).resolve()
        base = Path("runs") / f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
        base.parent.mkdir(exist_ok=True)
        return _new_directory(base).resolve()
    except OSError as error:
        raise ConfigError(
            f"cannot create the run's directory: {error}",
            where="--output-dir",
            fix="name a writable directory",
        ) from None
