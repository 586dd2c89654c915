"""The front end of a run: starts the agents, monitors them, and ends all of them on the first failure.

Whatever fails, be it a rank, a node, a connection or the front end itself, no process of the run remains:
agents end their ranks when told to, and when the front end falls silent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from launcher.cluster import processes, rendezvous
from launcher.cluster.attempt import Attempt, EndPolicy, LogOptions, RunOutcome
from launcher.cluster.node import Node
from launcher.cluster.node_group import NodeGroup
from launcher.cluster.node_spec import NodeSpec
from launcher.cluster.run_status import RunStatus
from launcher.cluster.signals import Interrupted, Signals
from launcher.cluster.wire import Message

MEETINGS = 3
"""How often a restart repeats the rendezvous while further nodes are being lost."""
logger = logging.getLogger("launcher")


Hello = Callable[[Node], Message]
Judge = Callable[[Sequence[Node]], None]
ShareAssigner = Callable[["FrontEnd"], list[NodeSpec]]
Prepare = Callable[[NodeGroup, Callable[[], None]], None]


class FrontEnd:
    """Runs one job on the nodes of a node group.

    Args:
        node_group: the nodes, not connected yet.
        hello: returns the first message to an agent.
        judge: raises a LauncherError if nodes cannot be used, whether they have answered or not.
        assign_shares: returns one specification per node; it may set the attributes below.
        meeting: the rendezvous options of the user.
        max_restarts: how often a failed run is restarted.
        min_nodes: a restart continues with this many nodes if others do not come back; None: `max_nodes`.
        max_nodes: use only the first so many available nodes, and keep the others in reserve; None: all.
        policy: see `EndPolicy`.
        leaves_slow_nodes: a restart excludes a node that has been slow for long, if enough others remain.
        prepare: called with the nodes that are ready, before `assign_shares`, and with a function that it
            must call while it waits.

    Attributes:
        log_options: how messages refer to the ranks; `assign_shares` may fill it in.
        restarts: the number of restarts so far.
        status: what the ranks are doing, published in a file.
    """

    def __init__(
        self,
        node_group: NodeGroup,
        hello: Hello,
        judge: Judge,
        assign_shares: ShareAssigner,
        *,
        meeting: rendezvous.RendezvousOptions,
        max_restarts: int = 0,
        min_nodes: int | None = None,
        max_nodes: int | None = None,
        policy: EndPolicy,
        leaves_slow_nodes: bool = False,
        prepare: Prepare | None = None,
    ) -> None:
        self.node_group, self.hello, self.judge, self.assign_shares, self.meeting = (
            node_group,
            hello,
            judge,
            assign_shares,
            meeting,
        )
        self.max_restarts, self.policy = max_restarts, policy
        self.prepare, self.leaves_slow_nodes = prepare, leaves_slow_nodes
        self.max_nodes = max_nodes or len(node_group.everyone)
        self.min_nodes = min_nodes or self.max_nodes
        self.restarts = 0
        self.status = RunStatus()
        self._chosen: list[Node] = []
        self.log_options = LogOptions(several=len(node_group.nodes) > 1 or not node_group.nodes[0].here)
        self._signals = Signals()

    def run(self) -> RunOutcome:
        """Run the job to its end, however it ends.

        When this returns, no process of the job is left on any node that could be reached; the message names
        the hosts where that is not known.

        Raises:
            LauncherError: the job cannot be started, and nothing was.
        """
        others = [child.pid for child in processes.descendants()]
        processes.adopt_orphans()
        with self._signals.heeded():
            try:
                for _ in self.node_group.connect(self.node_group.everyone, self.hello):
                    self._signals.look_up()
                met = self._meet()  # with all nodes: a mistake in the hostfile does not count as a lost node
                self._choose()
                self._prepare()
                return self._attempts(self.assign_shares(self), met)
            except Interrupted as error:
                return RunOutcome(
                    128 + error.number, f"stopped by {error.number.name} before any rank had started"
                )
            finally:
                self._signals.held = True
                self.node_group.close()
                # pdsh and mpirun leave behind the ssh processes that they started.
                processes.end_descendants(0, except_for=others)

    def _meet(self) -> rendezvous.RendezvousAddress:
        """Choose the rendezvous address of the ranks.

        Raises:
            LauncherError: a node is not ready.
        """
        met = rendezvous.meet(self.node_group, self.meeting, self._signals.look_up)
        self.judge(self.node_group.nodes)
        return met

    def _prepare(self) -> None:
        if self.prepare is not None:
            self.prepare(self.node_group, self._signals.look_up)

    def _attempts(self, shares: list[NodeSpec], met: rendezvous.RendezvousAddress) -> RunOutcome:
        while True:
            shares = [
                replace(share, master_addr=met.addr, master_port=met.port, attempt=self.restarts)
                for share in shares
            ]
            outcome, cause = Attempt(
                self.node_group,
                shares,
                self.log_options,
                self.policy,
                self._signals,
                self.status,
                self._may_leave,
            ).run()
            if cause is None or not cause.can_retry or self.restarts >= self.max_restarts:
                self.status.end(_state(outcome), outcome.message)
                return outcome
            self.status.end("restarting", outcome.message)
            self.restarts += 1
            cause.node.left_out = cause.slow
            logger.warning("%s", outcome.message)
            logger.warning("restart %d of %d", self.restarts, self.max_restarts)
            self._signals.held = self.node_group.ending = False
            changed, met = self._meet_again()
            self._prepare()
            if changed:
                shares = self.assign_shares(self)

    def _meet_again(self) -> tuple[bool, rendezvous.RendezvousAddress]:
        """Repeat the rendezvous. Return whether the nodes differ from the last attempt's, and the address.

        A node whose loss is noticed only now, after its ranks were stopped, has to come back, too.
        """
        changed = False
        for tries_left in reversed(range(MEETINGS)):
            self._bring_back()
            changed |= self._choose()
            met = rendezvous.meet(self.node_group, self.meeting, self._signals.look_up)
            if not (tries_left and any(node.lost is not None for node in self.node_group.nodes)):
                break
        self.judge(self.node_group.nodes)
        return changed, met

    def _bring_back(self) -> None:
        """Reconnect to the nodes that are not available.

        Raises:
            LauncherError: too few of them answer.
        """
        node_group = self.node_group
        if any(node.lost is not None for node in node_group.nodes):
            # Ranks left on lost nodes end on their own; they must not meet the ranks that are started now.
            self._pause(node_group.timeouts.grace_s)
        absent = [node for node in node_group.everyone if not (_is_there(node) or node.left_out)]
        for node in absent:
            if node.lost is not None or node.command:
                node_group.forget(node)
        began = time.monotonic()
        for _ in node_group.connect(absent, self.hello):
            self._signals.look_up()
            enough = sum(map(_is_there, node_group.everyone)) >= self.min_nodes
            if enough and time.monotonic() - began > node_group.timeouts.return_s:
                break
        if sum(map(_is_there, node_group.everyone)) < self.min_nodes:
            self.judge(node_group.everyone)

    def _choose(self) -> bool:
        """Choose the nodes of the next attempt. Return whether they differ from the previous ones.

        `assign_shares` may then exclude some of them; they stay excluded while the choice is the same.
        """
        before, self._chosen = (
            self._chosen,
            [n for n in self.node_group.everyone if _is_there(n)][: self.max_nodes],
        )
        if before == self._chosen:
            return False
        self.node_group.nodes = list(self._chosen)
        for word, some, others in (("without", before, self._chosen), ("with", self._chosen, before)):
            names = [node.name for node in some if node not in others]
            if before and names:
                logger.warning("continuing %s %s", word, ", ".join(names))
        return True

    def _may_leave(self, node: Node) -> bool:
        """Return whether a restart without this node is enabled, still allowed, and leaves enough nodes."""
        others = sum(_is_there(other) for other in self.node_group.everyone if other is not node)
        return self.leaves_slow_nodes and self.restarts < self.max_restarts and others >= self.min_nodes

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for _ in self.node_group.events():
                pass
            self._signals.look_up()


def _state(outcome: RunOutcome) -> str:
    """Return the final state of the run, in one word."""
    if outcome.exit_code == 0:
        return "completed"
    return "interrupted" if outcome.message and outcome.message.startswith("stopped by") else "failed"


def _is_there(node: Node) -> bool:
    return node.facts is not None and node.lost is None and not node.left_out
