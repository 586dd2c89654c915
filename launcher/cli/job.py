"""`Job`: builds a front end from the command line: the hosts, how to reach them, and agents' settings."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import socket
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli import shares
from launcher.cli.flags import value_of
from launcher.cli.recipes import PACKAGE
from launcher.cli.request import (
    THIS_MACHINE,
    RunRequest,
    check_bounds,
    hosts_of,
    joining_place,
    joining_token,
    restarts_of,
    selected,
)
from launcher.cluster import environment, facts, join, preflight, runners, sync
from launcher.cluster.attempt import EndPolicy
from launcher.cluster.frontend import FrontEnd
from launcher.cluster.hostfile import Host
from launcher.cluster.node import Node
from launcher.cluster.node_group import NodeGroup, NodeTimeouts
from launcher.cluster.node_spec import NodeSpec
from launcher.cluster.ray_nodes import RayNodes, ask_ray
from launcher.cluster.rendezvous import RendezvousOptions
from launcher.cluster.secret import secrets_of
from launcher.cluster.selection import select
from launcher.cluster.sync_manifest import SyncManifest, pack
from launcher.cluster.wire import Message
from launcher.errors import ConfigError
from launcher.replica import RUN

if TYPE_CHECKING:
    from launcher.config import Config

JOIN_S = 600.0
"""Seconds to wait for nodes that join on their own (`--no_ssh`)."""
RETURN_BEATS = 15
"""Heartbeats to wait for such nodes in a restart, which can continue without them."""
logger = logging.getLogger("launcher")


@dataclass
class Job:
    """A run as requested on the command line.

    Args:
        run: the recipe or script.
        flags: the launcher's flags.
        config: the validated JSON; None without `--config`.
        source: the configuration for the ranks: the JSON's absolute path, or its text in base64.
    """

    run: RunRequest
    flags: argparse.Namespace
    config: Config | None
    source: str | None
    hosts: list[Host] = field(default_factory=list)
    """Hosts without slots use all devices found on them."""
    asked: dict[str, str] = field(default_factory=dict)
    """Environment variables that the user exports to all nodes."""

    sync_manifest: SyncManifest | None = None
    """The files that `--sync` copies to the nodes."""

    output_dir: Path | None = None
    """The run's directory, once it has been created."""

    ray: RayNodes | None = field(init=False)

    id: str = field(default_factory=lambda: os.environ.get(RUN) or uuid.uuid4().hex)
    """Identical on all ranks, in all attempts and all replicas."""

    def __post_init__(self) -> None:
        flags = self.flags
        self.asked = environment.asked_for(flags.export, os.environ)
        self.runner = flags.launcher.lower() if flags.launcher else "ssh"
        self.device = (self.run.is_ours and value_of(self.run.arguments, "--device")) or flags.device
        self.ray = _nodes_of_ray(flags, self.device) if self.runner == "ray" else None
        self.hosts = hosts_of(flags, self.runner) if self.ray is None else self.ray.hosts
        # Without a hostfile, the slots of a host are known only once its agent has reported them.
        self.late_choice = not self.hosts[0].slots
        if not self.late_choice:
            self.hosts = selected(self.hosts, flags)
        elif flags.num_nodes is not None and not (flags.include or flags.exclude):
            self.hosts = select(self.hosts, num_nodes=flags.num_nodes)
        check_bounds(flags, len(self.hosts))
        if not flags.no_ssh and any(not self.is_here(host) for host in self.hosts):
            runners.check_runner(self.runner)
        files = self._files()
        if flags.sync is not None:
            self.sync_manifest = pack(files, flags.sync or None, os.getcwd())
        needs = files if self.sync_manifest is None else []
        if self.run.is_ours:  # a recipe is part of the package
            needs = [self.run.target, *needs]
        self.needs = {path: facts.digest(Path(path)) for path in needs}

    @property
    def timeouts(self) -> NodeTimeouts:
        timeouts = NodeTimeouts(silence_s=self.flags.node_timeout)
        if self.flags.no_ssh:
            return replace(timeouts, connect_s=JOIN_S, return_s=RETURN_BEATS * timeouts.beat_s)
        return timeouts

    def front_end(self) -> FrontEnd:
        nodes = [self._node(host, i) for i, host in enumerate(self.hosts)]
        flags = self.flags
        meeting = RendezvousOptions(flags.master_addr, flags.master_port)
        restarts, least = restarts_of(flags)
        open_to_view = any(node.dials for node in nodes)
        if open_to_view and (
            kept := secrets_of(environment.passed_on(os.environ)).keys() - self.asked.keys()
        ):
            logger.warning(
                "%s: the connections of %s are not encrypted, so nodes use their own values, if any",
                *(", ".join(sorted(kept)), self.runner),
            )
        admit = None
        if flags.no_ssh:
            addr, port = joining_place(flags)
            meeting = RendezvousOptions(addr, None)
            if len(nodes) > 1:  # a single node has no others to admit
                admit = join.JoinServer(addr, port, joining_token(flags)).admit
        return FrontEnd(
            NodeGroup(nodes, self.timeouts, admit),
            self.hello,
            self.judge,
            self.assign_shares,
            meeting=meeting,
            max_restarts=restarts,
            min_nodes=least,
            max_nodes=flags.max_nodes,
            leaves_slow_nodes=flags.on_straggler == "restart-without",
            policy=EndPolicy(flags.hang_timeout, flags.term_grace, flags.checkpoint_exit_code),
            prepare=None if self.sync_manifest is None else self._ship,
        )

    def _node(self, host: Host, index: int) -> Node:
        here = self.is_here(host)
        dials = not (here or self.flags.no_ssh) and runners.RUNNERS[self.runner].dials
        return Node(host, index, self.command(host), dials=dials, here=here)

    def command(self, host: Host) -> list[str]:
        """Return the command that starts the agent of a host from this machine."""
        if self.is_here(host):
            return runners.HERE.command(host, self._settings())
        if self.flags.no_ssh:
            return []
        return runners.command(self.runner, host, self._settings())

    def shell_command(self, host: Host, line: str) -> list[str]:
        """Return the command that runs a shell line on a host from this machine."""
        if self.is_here(host):
            return ["sh", "-c", line]
        return [*runners.command("ssh", host, self._settings())[:-1], line]

    def _settings(self) -> runners.RunnerOptions:
        flags = self.flags
        return runners.RunnerOptions(
            extra=shlex.split(flags.launcher_args or ""),
            ssh_port=flags.ssh_port,
            venv_script=flags.venv_script,
            connect_s=self.timeouts.connect_s,
            ray=self.ray,
        )

    def hello(self, node: Node) -> Message:
        """Return the first message to an agent."""
        # A node that joins on its own has its own environment.
        own = self.is_here(node.host) or self.flags.no_ssh
        told = self.asked if own else {**environment.passed_on(os.environ), **self.asked}
        kept = secrets_of(told) if self._travels_open(node) else {}
        return {
            "environment": {name: value for name, value in told.items() if name not in kept},
            "own": [name for name in kept if name in self.asked],
            "forget": [] if own else environment.of_mpi(),
            "python": list(sys.version_info[:2]),
            "directory": None
            if self.sync_manifest is not None and self.sync_manifest.directory
            else os.getcwd(),
            "path": [str(PACKAGE.parent)],
            "needs": list(self.needs),
            "count_gpus": self.device != "cpu",
            # A front end on the same machine may be suspended by Ctrl-Z; if it dies, the pipe closes.
            "silence_s": 1e9 if node.here else self.timeouts.silence_s,
            "beat_s": self.timeouts.beat_s,
        }

    def _travels_open(self, node: Node) -> bool:
        """Return whether messages to the agent are readable in transit: TCP is signed but not encrypted."""
        return not node.here and (self.flags.no_ssh or node.dials)

    def _ship(self, node_group: NodeGroup, look_up: Callable[[], None]) -> None:
        assert self.sync_manifest is not None
        sync.ship(node_group, self.sync_manifest, look_up)

    def there(self, node: Node, path: str) -> str:
        """Return the path on a node of a file that has the path `path` on this machine."""
        place = self.sync_manifest.places.get(path) if self.sync_manifest is not None else None
        return path if place is None else f"{node.copy}/{place}"

    def assign_shares(self, front_end: FrontEnd) -> list[NodeSpec]:
        """Return the share of each ready node; also sets how `front_end` labels the ranks in its output.

        Raises:
            ConfigError: more ranks than devices, or degrees whose product does not match the number of ranks.
        """
        return shares.deal(self, front_end)

    def judge(self, nodes: Sequence[Node]) -> None:
        """Raise `ConfigError` if a node is not ready."""
        preflight.judge(nodes, preflight.NodeRequirements(self.needs, self.device, compare=len(nodes) > 1))

    def _files(self) -> list[str]:
        """Return the absolute paths of the user's script and configuration file, if any."""
        files = [self.run.target] if self.run.kind == "script" and not self.run.is_ours else []
        if self.source is not None and os.path.isabs(self.source):
            files.append(self.source)
        return files

    def is_here(self, host: Host) -> bool:
        """Return whether a host is this machine, which is reached without ssh."""
        if self.flags.no_ssh:
            return host == self.hosts[0]
        if self.ray is not None:  # Ray tracks what else runs on this machine
            return False
        return not self.flags.force_multi and host.name in (THIS_MACHINE, "127.0.0.1", socket.gethostname())


def _nodes_of_ray(flags: argparse.Namespace, device: str | None) -> RayNodes:
    """Return the nodes that Ray allocates for these flags."""
    for name in ("hostfile", "include", "exclude", "no_ssh", "launcher_args", "ssh_port"):
        if getattr(flags, name):
            raise ConfigError(
                f"--{name} cannot be used with --launcher ray, which selects and reaches the nodes itself",
                fix=f"leave --{name} out; --num_nodes and --num_gpus set how many are requested from Ray",
            )
    slots = flags.num_gpus if isinstance(flags.num_gpus, int) else None
    nodes = ask_ray(flags.address, flags.num_nodes, slots, device, reserve=not flags.dry_run)
    logger.info("Ray allocated %s", ", ".join(f"{host.name} ({len(host.slots)})" for host in nodes.hosts))
    return nodes
