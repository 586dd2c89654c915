"""From the command line to what a front end runs: hosts, what their agents are told, and the share of each."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.flags import value_of
from launcher.cli.recipes import PACKAGE
from launcher.cli.request import (
    THIS_MACHINE,
    Request,
    check_bounds,
    hosts_of,
    joining_place,
    restarts_of,
    run_directory,
    selected,
)
from launcher.cluster import cores, environment, facts, join, preflight, runners, sync
from launcher.cluster.attempt import Patience
from launcher.cluster.crew import Crew, Limits
from launcher.cluster.frontend import FrontEnd
from launcher.cluster.hostfile import Host
from launcher.cluster.node import Node
from launcher.cluster.parcel import Parcel, pack
from launcher.cluster.rendezvous import Wanted
from launcher.cluster.selection import first_ranks, select
from launcher.cluster.share import Share
from launcher.cluster.wire import Message
from launcher.errors import ConfigError

if TYPE_CHECKING:
    from launcher.config import Config

JOIN_S = 600.0
"""How long nodes that come by themselves are waited for."""
RETURN_BEATS = 15
"""And how long, in heartbeats, by a restart that can do without them."""
logger = logging.getLogger("launcher")


@dataclass
class Job:
    """A run as it was asked for.

    Args:
        run: the recipe or script.
        flags: the launcher's.
        config: the JSON, found right; None where none is named.
        source: what the ranks read: the JSON's absolute path, or its text in base64.
    """

    run: Request
    flags: argparse.Namespace
    config: Config | None
    source: str | None
    hosts: list[Host] = field(default_factory=list)
    """Hosts without slots use all devices that are found there."""
    asked: dict[str, str] = field(default_factory=dict)
    """Variables that the user asked for, for all nodes."""

    parcel: Parcel | None = None
    """What `--sync` ships."""

    output_dir: Path | None = None
    """The run's directory, once it is made."""

    def __post_init__(self) -> None:
        flags = self.flags
        self.asked = environment.asked_for(flags.export, os.environ)
        self.runner = flags.launcher.lower() if flags.launcher else "ssh"
        self.hosts = hosts_of(flags, self.runner)
        # Which slots a host without a hostfile has is seen there.
        self.late_choice = not self.hosts[0].slots
        if not self.late_choice:
            self.hosts = selected(self.hosts, flags)
        elif flags.num_nodes is not None and not (flags.include or flags.exclude):
            self.hosts = select(self.hosts, num_nodes=flags.num_nodes)
        check_bounds(flags, len(self.hosts))
        if not flags.no_ssh and any(not self._is_here(host) for host in self.hosts):
            runners.check_runner(self.runner)
        self.device = (self.run.is_ours and value_of(self.run.arguments, "--device")) or flags.device
        files = self._files()
        if flags.sync is not None:
            self.parcel = pack(files, flags.sync or None, os.getcwd())
        needs = files if self.parcel is None else []
        if self.run.is_ours:  # a recipe comes with the package
            needs = [self.run.target, *needs]
        self.needs = {path: facts.digest(Path(path)) for path in needs}

    @property
    def limits(self) -> Limits:
        limits = Limits(silence_s=self.flags.node_timeout)
        if self.flags.no_ssh:
            return replace(limits, connect_s=JOIN_S, return_s=RETURN_BEATS * limits.beat_s)
        return limits

    def front_end(self) -> FrontEnd:
        nodes = [self._node(host, i) for i, host in enumerate(self.hosts)]
        flags = self.flags
        meeting = Wanted(flags.master_addr, flags.master_port)
        restarts, least = restarts_of(flags)
        admit = None
        if flags.no_ssh:
            addr, port = joining_place(flags)
            admit, meeting = join.Door(addr, port).admit, Wanted(addr, None)
        return FrontEnd(
            Crew(nodes, self.limits, admit),
            self.hello,
            self.judge,
            self.plan,
            meeting=meeting,
            max_restarts=restarts,
            min_nodes=least,
            max_nodes=flags.max_nodes,
            patience=Patience(flags.hang_timeout, flags.term_grace),
            prepare=None if self.parcel is None else self._ship,
        )

    def _node(self, host: Host, index: int) -> Node:
        here = self._is_here(host)
        dials = not (here or self.flags.no_ssh) and runners.RUNNERS[self.runner].dials
        return Node(host, index, self.command(host), dials=dials, here=here)

    def command(self, host: Host) -> list[str]:
        """What is run on this machine to start the agent of a host."""
        if self._is_here(host):
            return runners.HERE.command(host, self._settings())
        if self.flags.no_ssh:
            return []
        return runners.command(self.runner, host, self._settings())

    def shell_command(self, host: Host, line: str) -> list[str]:
        """What is run on this machine for a line of shell on a host."""
        if self._is_here(host):
            return ["sh", "-c", line]
        return [*runners.command("ssh", host, self._settings())[:-1], line]

    def _settings(self) -> runners.Settings:
        flags = self.flags
        return runners.Settings(
            extra=shlex.split(flags.launcher_args or ""),
            ssh_port=flags.ssh_port,
            venv_script=flags.venv_script,
            connect_s=self.limits.connect_s,
        )

    def hello(self, node: Node) -> Message:
        """What an agent is told first."""
        here = (
            self._is_here(node.host) or self.flags.no_ssh
        )  # a node that comes by itself has its own variables
        return {
            "environment": self.asked if here else {**environment.passed_on(os.environ), **self.asked},
            "forget": [] if here else environment.of_mpi(),
            "python": list(sys.version_info[:2]),
            "directory": None if self.parcel is not None and self.parcel.directory else os.getcwd(),
            "path": [str(PACKAGE.parent)],
            "needs": list(self.needs),
            "count_gpus": self.device != "cpu",
            # A front end on the same machine may be stopped by Ctrl-Z; that it has died the pipe tells.
            "silence_s": 1e9 if node.here else self.limits.silence_s,
            "beat_s": self.limits.beat_s,
        }

    def _ship(self, crew: Crew, look_up: Callable[[], None]) -> None:
        assert self.parcel is not None
        sync.ship(crew, self.parcel, look_up)

    def _there(self, node: Node, path: str) -> str:
        """Where a node finds a file that is named here."""
        place = self.parcel.places.get(path) if self.parcel is not None else None
        return path if place is None else f"{node.copy}/{place}"

    def judge(self, nodes: Sequence[Node]) -> None:
        """Raise `ConfigError` where a node is not ready."""
        preflight.judge(nodes, preflight.Needs(self.needs, self.device, compare=len(nodes) > 1))

    def plan(self, front_end: FrontEnd) -> list[Share]:
        """The shares of the nodes, which are ready; tells `front_end` how to speak of the ranks.

        Raises:
            ConfigError: more ranks than devices, or degrees that do not make the number of ranks.
        """
        device, hosts = self._choose(front_end.crew.nodes)
        hosts = self._allowed(hosts, is_restart=front_end.restarts > 0)
        node_of = {node.name: node for node in front_end.crew.nodes}
        nodes = front_end.crew.nodes = [node_of[host.name] for host in hosts]
        counts = [len(host.slots) for host in hosts]
        total = sum(counts)
        if self.config is not None:
            from launcher.config.ranks import places as places_of

            dp = self.config.dp_degree(total)  # raises where the degrees do not make the number of ranks
            if self.run.is_ours or self.config.pipeline.stages is not None:  # else a script's model may say
                degrees = self.config.pipeline.degree, dp, self.config.tensor_parallel.degree
                front_end.speech.places = places_of(*degrees)
        self._check_binding(counts)
        if self.output_dir is None:
            self.output_dir = run_directory(value_of(self.run.arguments, "--output-dir"), self.run.name)
        output_dir = self.output_dir
        common = self._common(output_dir, device)
        shown = [] if self.flags.enable_each_rank_log else self._shown(total)
        firsts = [sum(counts[:i]) for i in range(len(counts))]
        front_end.speech.shown = _names(hosts, shown) if shown != [0] else {}
        front_end.speech.shows_rank_0 = shown == [0]
        self._say_what_starts(nodes, counts, device)
        logger.info("run directory: %s", output_dir)
        masked = device == "cuda" and (self.flags.hostfile or self.flags.include or self.flags.exclude)
        return [
            replace(
                common,
                target=self._there(node, common.target),
                environment={name: self._there(node, value) for name, value in common.environment.items()},
                ranks=len(host.slots),
                first_rank=first,
                world_size=total,
                node=index,
                nodes=len(nodes),
                shown=shown,
                slots=host.slots if masked else None,
            )
            for index, (node, host, first) in enumerate(zip(nodes, hosts, firsts, strict=True))
        ]

    def _common(self, output_dir: Path, device: str) -> Share:
        """What the shares of all nodes have in common."""
        flags, run = self.flags, self.run
        to_files = flags.enable_each_rank_log
        variables = {
            "LAUNCHER_DEVICE": device,
            "LAUNCHER_OUTPUT_DIR": str(output_dir),
            "LAUNCHER_LOG_LEVEL": logging.getLevelName(logger.level).lower(),
        }
        if flags.term_grace:
            variables["LAUNCHER_TERM_GRACE"] = str(flags.term_grace)
        if self.source is not None:
            variables["LAUNCHER_CONFIG"] = self.source
        if not (run.is_ours or flags.no_deepspeed_shim):
            from launcher.cli import hugging_face

            variables |= hugging_face.variables(flags.config)
            logger.info(
                "`import deepspeed` in %s is this package's engine (--no_deepspeed_shim: it is not)", run.name
            )
        bind = flags.bind_cores_to_rank or flags.bind_core_list
        return Share(
            kind=run.kind,
            target=run.target,
            arguments=run.arguments,
            log_dir=str(Path(to_files).resolve() if to_files else output_dir / "logs"),
            log_prefix=time.strftime("%Y%m%d-%H%M%S_") if to_files else "",
            append_local_rank=not (run.is_ours or flags.no_local_rank),
            environment=variables,
            watched=flags.hang_timeout > 0,
            bind_cores=(flags.bind_core_list or "") if bind else None,
        )

    def _files(self) -> list[str]:
        """Absolute paths of the script and the configuration, where they are files of the user's."""
        files = [self.run.target] if self.run.kind == "script" and not self.run.is_ours else []
        if self.source is not None and os.path.isabs(self.source):
            files.append(self.source)
        return files

    def _is_here(self, host: Host) -> bool:
        """Whether a host is this machine, which needs no ssh."""
        if self.flags.no_ssh:
            return host == self.hosts[0]
        return not self.flags.force_multi and host.name in (THIS_MACHINE, "127.0.0.1", socket.gethostname())

    def _choose(self, nodes: Sequence[Node]) -> tuple[str, list[Host]]:
        """The kind of device, and the hosts with the slots that are used there: where nobody has said them, all.

        Raises:
            ConfigError: more ranks are wanted than there are devices.
        """
        seen = [node.facts["gpus"] for node in nodes if node.facts is not None]
        device = "cuda" if self.device != "cpu" and min(seen) > 0 else "cpu"
        if not self.late_choice:
            return device, [node.host for node in nodes]
        hosts: list[Host] = []
        for node, gpus in zip(nodes, seen, strict=True):
            wanted = self.flags.num_gpus
            if device == "cuda" and wanted is not None and wanted > gpus:
                raise ConfigError(
                    f"{wanted} ranks are wanted and {_spoken(node)} shows {gpus} CUDA devices",
                    where=f"--num_gpus {wanted}",
                    fix=f"write --num_gpus {gpus}, or --device cpu to run the ranks on the CPU",
                )
            there = gpus if device == "cuda" else wanted or 1
            hosts.append(Host(node.host.name, tuple(range(there))))
        return device, selected(hosts, self.flags)

    def _allowed(self, hosts: list[Host], *, is_restart: bool) -> list[Host]:
        """The hosts with as many slots as the JSON's `elasticity` allows; only a restart leaves some unused.

        Raises:
            ConfigError: it does not allow so many ranks, nor, after a restart, fewer.
        """
        total = sum(len(host.slots) for host in hosts)
        sizes = self.config.elasticity.world_sizes if self.config is not None else None
        if self.config is None or sizes is None or total in sizes:
            return hosts
        fewer = [size for size in sizes if size < total]
        if is_restart and fewer:
            logger.warning("elasticity allows %d of the %d ranks", fewer[-1], total)
            return first_ranks(hosts, fewer[-1])
        from launcher.config.elasticity import refusal

        problem = refusal(self.config.elasticity, total)
        raise ConfigError(problem.what, where=self.config.where("elasticity"), fix=problem.fix)

    def _check_binding(self, counts: Sequence[int]) -> None:
        """The nodes bind cores themselves; mistakes that can be seen here are told before anything starts."""
        flags = self.flags
        if (flags.bind_cores_to_rank or flags.bind_core_list) and self._is_here(self.hosts[0]):
            listed = (
                cores.parse_core_list(flags.bind_core_list) if flags.bind_core_list else cores.usable_cores()
            )
            cores.share_cores(listed, counts[0])

    def _shown(self, total: int) -> list[int]:
        """Ranks whose output goes to the terminal: rank 0, and those of `--tee`.

        Raises:
            ConfigError: there is no such rank.
        """
        wanted = self.flags.tee
        if wanted is None:
            return [0]
        if wanted == "all":
            return list(range(total))
        ranks = sorted({0, *(int(text) for text in wanted.split(","))})
        if ranks[-1] >= total:
            raise ConfigError(
                f"there is no rank {ranks[-1]}", where=f"--tee {wanted}", fix=f"the last is {total - 1}"
            )
        return ranks

    def _say_what_starts(self, nodes: Sequence[Node], counts: Sequence[int], device: str) -> None:
        first = nodes[0].facts
        assert first is not None
        count = "1 rank" if sum(counts) == 1 else f"{sum(counts)} ranks"
        where = f" of {len(nodes)} hosts ({_few(nodes)})" if len(nodes) > 1 else f" of {nodes[0].name}"
        if nodes[0].name == THIS_MACHINE:
            where = ""
        backend = "nccl" if device == "cuda" else "gloo"
        threads = ""
        if first["threads"] is None and not (self.flags.bind_cores_to_rank or self.flags.bind_core_list):
            number = max(1, first["cores"] // counts[0])
            threads = f", OMP_NUM_THREADS={number} (cores / ranks)"
        logger.info("%s on %s%s, backend %s%s", count, device, where, backend, threads)


def _names(hosts: Sequence[Host], shown: Sequence[int]) -> dict[int, str]:
    """How each shown rank's lines begin."""
    host_of = [host.name for host in hosts for _ in host.slots]
    return {rank: f"{host_of[rank]}:{rank}: " if len(hosts) > 1 else f"{rank}: " for rank in shown}


def _spoken(node: Node) -> str:
    return "this machine" if node.name == THIS_MACHINE else node.name


def _few(nodes: Sequence[Node]) -> str:
    return preflight.few([node.name for node in nodes])
