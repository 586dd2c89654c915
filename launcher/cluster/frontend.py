"""The front end: owns a run. It starts the agents, watches them, and ends all of them on the first failure.

Whatever happens to a rank, a node, a connection or to itself, no process of the run remains: agents end their ranks
when they are told to, and when they hear nothing any more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from launcher.cluster import processes, rendezvous
from launcher.cluster.attempt import Attempt, Outcome, Patience, Speech
from launcher.cluster.crew import Crew
from launcher.cluster.node import Node
from launcher.cluster.share import Share
from launcher.cluster.signals import Interrupted, Signals
from launcher.cluster.wire import Message

logger = logging.getLogger("launcher")


Hello = Callable[[Node], Message]
Judge = Callable[[Sequence[Node]], None]
Plan = Callable[["FrontEnd"], list[Share]]


class FrontEnd:
    """Runs one job on the nodes of a crew.

    Args:
        crew: the nodes, not connected yet.
        hello: what an agent is told first.
        judge: raises a LauncherError where nodes that have answered, or have not, cannot be used.
        plan: the shares, one a node; it may set the attributes below.
        meeting: the rendezvous that the user asked for.
        max_restarts: how often a failed run is started again.
        min_nodes: a restart goes on with so many nodes where others do not come back; None: all are needed.
        patience: see `Patience`.

    Attributes:
        speech: how to speak of the ranks; `plan` may fill it in.
    """

    def __init__(
        self,
        crew: Crew,
        hello: Hello,
        judge: Judge,
        plan: Plan,
        *,
        meeting: rendezvous.Wanted,
        max_restarts: int = 0,
        min_nodes: int | None = None,
        patience: Patience,
    ) -> None:
        self.crew, self.hello, self.judge, self.plan, self.meeting = crew, hello, judge, plan, meeting
        self.max_restarts, self.min_nodes, self.patience = max_restarts, min_nodes, patience
        self.speech = Speech(several=len(crew.nodes) > 1 or not crew.nodes[0].here)
        self._signals = Signals()

    def run(self) -> Outcome:
        """Run the job to its end, however it ends. When this returns no process of it is left where a node could be
        reached; the message names the hosts where that is not known.

        Raises:
            LauncherError: it cannot be started, and nothing was.
        """
        others = [child.pid for child in processes.descendants()]
        processes.adopt_orphans()
        with self._signals.heeded():
            try:
                for _ in self.crew.connect(self.crew.nodes, self.hello):
                    self._signals.look_up()
                self.judge(self.crew.nodes)
                shares = self.plan(self)
                return self._attempts(shares)
            except Interrupted as error:
                return Outcome(
                    128 + error.number, f"stopped by {error.number.name} before any rank had started"
                )
            finally:
                self._signals.held = True
                self.crew.close()
                # pdsh and mpirun leave the ssh that they started.
                processes.end_descendants(0, except_for=others)

    def _attempts(self, shares: list[Share]) -> Outcome:
        attempt = 0
        while True:
            met = rendezvous.meet(self.crew, self.meeting, self._signals.look_up)
            shares = [replace(s, master_addr=met.addr, master_port=met.port, attempt=attempt) for s in shares]
            outcome, cause = Attempt(self.crew, shares, self.speech, self.patience, self._signals).run()
            if cause is None or not cause.can_retry or attempt >= self.max_restarts:
                return outcome
            attempt += 1
            logger.warning("%s", outcome.message)
            logger.warning("restart %d of %d", attempt, self.max_restarts)
            self._signals.held = self.crew.ending = False
            if self._bring_back():
                shares = self.plan(self)

    def _bring_back(self) -> bool:
        """Connect again to the nodes that were lost; whether some of them are left out now.

        Raises:
            LauncherError: one of them does not answer, and is needed.
        """
        gone = [node for node in self.crew.nodes if node.lost is not None]
        if gone:  # what is left there ends by itself; it must not meet what is started now
            self._pause(self.crew.limits.grace_s)
        for node in gone:
            self.crew.forget(node)
        for _ in self.crew.connect(gone, self.hello):
            self._signals.look_up()
        there = [node for node in self.crew.nodes if node.lost is None]
        without = [node.name for node in self.crew.nodes if node.lost is not None]
        goes_on = bool(without) and self.min_nodes is not None and len(there) >= self.min_nodes
        if goes_on:
            logger.warning("going on without %s", ", ".join(without))
            self.crew.nodes = there
            for index, node in enumerate(there):
                node.index = index
        self.judge(self.crew.nodes)
        return goes_on

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for _ in self.crew.events():
                pass
            self._signals.look_up()
