"""The front end: owns a run. It starts the agents, watches them, and ends all of them on the first failure.

Whatever happens to a rank, a node, a connection or to itself, no process of the run remains: agents end their ranks
when they are told to, and when they hear nothing any more.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from types import FrameType

from launcher.cluster import hang, processes, rendezvous
from launcher.cluster.crew import Crew
from launcher.cluster.failure import Failure, describe, exit_code
from launcher.cluster.node import Node
from launcher.cluster.screen import Screen
from launcher.cluster.share import Share
from launcher.cluster.wire import Message, bytes_of
from launcher.errors import ConfigError

STACKS_S = 3.0
"""How long agents may take to tell the stacks of their ranks."""
AFTER_GRACE_S = 4.0
"""How much longer than the grace of its ranks an agent may take to say that all have ended."""
DOUBTFUL_S = 1.5
"""How long a node is waited for that had missed heartbeats before the end."""
LOSS_COMES_FIRST_S = 1.0
"""A lost node is the cause of failures that ranks elsewhere recorded up to so long before it was noticed."""
logger = logging.getLogger("launcher")


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    exit_code: int
    message: str | None = None
    """What to tell the user where it failed or was interrupted."""


@dataclass(frozen=True)
class Cause:
    """Why a run ends before its time."""

    time: float
    """Seconds since the epoch, by the front end's clock."""
    message: str
    exit_code: int
    node: Node
    can_retry: bool = True
    lost: bool = False


class Interrupted(Exception):
    """A signal came; `number` is which."""

    def __init__(self, number: int) -> None:
        self.number = signal.Signals(number)


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
        term_grace_s: seconds that ranks have after a SIGTERM to this process before they are ended.
        hang_s: seconds without progress of any rank after which the run is taken to hang; 0: never.

    Attributes:
        places: what each rank is in the mesh, for people.
        shown: the name of each rank that is shown; empty shows rank 0 as it is.
        shows_rank_0: the output of rank 0 is on the terminal as it is.
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
        hang_s: float = 0.0,
        min_nodes: int | None = None,
        term_grace_s: float = 0.0,
    ) -> None:
        self.crew, self.hello, self.judge, self.plan, self.meeting = crew, hello, judge, plan, meeting
        self.max_restarts, self.hang_s, self.min_nodes = max_restarts, hang_s, min_nodes
        self.term_grace_s = term_grace_s
        self._stalled: dict[Node, float] = {}
        self.places: Sequence[str] = ()
        self.shown: dict[int, str] = {}
        self.shows_rank_0 = False
        self.several = len(crew.nodes) > 1 or not crew.nodes[0].here
        self._signals: list[int] = []
        self._ending = False

    def run(self) -> Outcome:
        """Run the job to its end, however it ends. When this returns no process of it is left where a node could be
        reached; the message names the hosts where that is not known.

        Raises:
            LauncherError: it cannot be started, and nothing was.
        """
        others = [child.pid for child in processes.descendants()]
        processes.adopt_orphans()
        with self._heeding_signals():
            try:
                for _ in self.crew.connect(self.crew.nodes, self.hello):
                    self._look_up()
                self.judge(self.crew.nodes)
                shares = self.plan(self)
                return self._attempts(shares)
            except Interrupted as error:
                return Outcome(
                    128 + error.number, f"stopped by {error.number.name} before any rank had started"
                )
            finally:
                self._ending = True
                self.crew.close()
                # pdsh and mpirun leave the ssh that they started.
                processes.end_descendants(0, except_for=others)

    def _attempts(self, shares: list[Share]) -> Outcome:
        attempt = 0
        while True:
            met = rendezvous.meet(self.crew, self.meeting, self._look_up)
            shares = [replace(s, master_addr=met.addr, master_port=met.port, attempt=attempt) for s in shares]
            outcome, cause = self._attempt(shares)
            if cause is None or not cause.can_retry or attempt >= self.max_restarts:
                return outcome
            attempt += 1
            logger.warning("%s", outcome.message)
            logger.warning("restart %d of %d", attempt, self.max_restarts)
            self._ending = self.crew.ending = False
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
            self._look_up()
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
            self._look_up()

    def _attempt(self, shares: list[Share]) -> tuple[Outcome, Cause | None]:
        """Start all ranks and wait for their end; the cause is None unless something failed."""
        screen = Screen(self.shown)
        size = screen.size if shares[0].shown else None
        log_dir = shares[0].log_dir
        causes: list[Cause] = []
        number = None
        try:
            for node, share in zip(self.crew.nodes, shares, strict=True):
                node.running, node.complete = True, False
                terminal = size if share.first_rank == 0 else None
                node.send("start", share=asdict(replace(share, terminal=terminal)))
            size = self._watch(screen, causes, size, log_dir)
        except Interrupted as error:
            number = error.number
            if number == signal.SIGTERM and self.term_grace_s:
                self._let_finish(screen, causes)
        unclean = self._end(screen, causes, shares)
        screen.close()
        left = self._told(unclean)
        if number is not None:
            return Outcome(128 + number, f"stopped by {number.name}; logs: {log_dir}{left}"), None
        unfinished = [node for node in self.crew.nodes if not node.complete]
        if not causes and not unfinished:
            return Outcome(0), None
        if not causes:
            silent = ", ".join(node.name for node in unfinished)
            return Outcome(1, f"nobody said how the ranks of {silent} ended; logs: {log_dir}{left}"), None
        cause = min(causes, key=lambda c: c.time)
        return Outcome(cause.exit_code, cause.message + left), cause

    def _watch(
        self, screen: Screen, causes: list[Cause], size: tuple[int, int] | None, log_dir: str
    ) -> tuple[int, int] | None:
        """Until every node has ended well, or one has not."""
        failing = False
        self._stalled.clear()
        while any(node.running for node in self.crew.nodes) and not (failing or causes):
            for node, message in self.crew.events():
                failing = failing or message["is"] == "failing"
                self._take(node, message, screen, causes)
            self._look_up()
            if self.hang_s and self._stalled and min(self._stalled.values()) >= self.hang_s:
                causes.append(self._hang(screen, causes, log_dir))
            if size is not None and screen.size not in (None, size):
                size = screen.size or size
                self.crew.nodes[0].send("resize", rows=size[0], columns=size[1])
        return size

    def _take(self, node: Node, message: Message, screen: Screen, causes: list[Cause]) -> None:
        match message["is"]:
            case "alive" if message["stalled_s"] is not None:
                self._stalled[node] = message["stalled_s"]
            case "output":
                screen.show(message["rank"], bytes_of(message["text"]))
            case "refused":
                node.running = False
                error = ConfigError(message["what"], where=message["where"], fix=message["fix"])
                host = f"{node.name}: " if self.several else ""
                causes.append(Cause(time.time(), f"{host}{error}", 2, node, can_retry=False))
            case "ended":
                node.running, node.complete = False, message["complete"]
                if message["failure"]:
                    failure = Failure.from_json(message["failure"])
                    # What the node's clock says is only compared with itself.
                    when = time.time() - (message["now"] - failure.time)
                    causes.append(self._failed(node, failure, when))
            case "lost":
                node.running = False
                ranks = (
                    f"{node.name} was lost: {node.lost}"
                    if self.several
                    else f"the agent was lost: {node.lost}"
                )
                causes.append(Cause(time.time() - LOSS_COMES_FIRST_S, ranks, 1, node, lost=True))

    def _let_finish(self, screen: Screen, causes: list[Cause]) -> None:
        """Pass SIGTERM on, and wait for ranks that save a checkpoint, until another signal comes."""
        self._ending = True
        logger.warning("SIGTERM: ranks have %g s to save a checkpoint", self.term_grace_s)
        self.crew.tell(self.crew.nodes, "signal", number=int(signal.SIGTERM))
        until = time.monotonic() + self.term_grace_s
        while (
            any(node.running for node in self.crew.nodes)
            and time.monotonic() < until
            and len(self._signals) < 2
        ):
            for node, message in self.crew.events():
                self._take(node, message, screen, causes)

    def _hang(self, screen: Screen, causes: list[Cause], log_dir: str) -> Cause:
        """Ask every rank what it does, and say it."""
        asked = [node for node in self.crew.nodes if node.running]
        self.crew.tell(asked, "stacks")
        states: list[hang.RankState] = []
        answered: set[Node] = set()
        until = time.monotonic() + STACKS_S
        while len(answered) < len(asked) and time.monotonic() < until:
            for node, message in self.crew.events():
                if message["is"] == "stacks":
                    answered.add(node)
                    states += [hang.RankState(host=node.name, **state) for state in message["states"]]
                else:
                    self._take(node, message, screen, causes)
        states.sort(key=lambda state: state.rank)
        hang.write(states, log_dir)
        return Cause(time.time(), hang.describe(states, log_dir), 1, asked[0])

    def _failed(self, node: Node, failure: Failure, when: float) -> Cause:
        message = describe(
            failure,
            log_was_shown=failure.rank == 0 and self.shows_rank_0,
            place=self.places[failure.rank] if self.places else "",
            host=node.name if self.several else "",
        )
        mistake = failure.record is not None and failure.record.kind == "mendable"
        return Cause(when, message, exit_code(failure), node, can_retry=not mistake)

    def _end(self, screen: Screen, causes: list[Cause], shares: list[Share]) -> list[Node]:
        """End what runs still; the nodes of which that is not known."""
        self._ending = self.crew.ending = True
        grace = self.crew.limits.grace_s
        running = [node for node in self.crew.nodes if node.running]
        self.crew.tell(running, "stop", grace_s=grace)
        began = time.monotonic()
        deadline = began + grace + AFTER_GRACE_S
        # Nodes that have missed heartbeats already are probably gone, too: where this machine is cut off, all are.
        doubtful = [node for node in running if began - node.heard > 2.5 * self.crew.limits.beat_s]
        told_to_hurry = False
        while any(node.running for node in running) and time.monotonic() < deadline:
            for node, message in self.crew.events():
                self._take(node, message, screen, causes)
            if time.monotonic() - began > DOUBTFUL_S:
                for node in doubtful:
                    if node.running and node.heard < began and not node.here:
                        node.give_up("it has not answered for a while")
            if len(self._signals) > 1 and not told_to_hurry:
                told_to_hurry = True
                deadline = min(deadline, time.monotonic() + AFTER_GRACE_S)
        for node in running:
            if node.running:
                node.give_up(f"it did not say within {grace + AFTER_GRACE_S:g} s that its ranks had ended")
        return [node for node in self.crew.nodes if node.lost is not None]

    def _told(self, unclean: list[Node]) -> str:
        if not unclean:
            return ""
        names = ", ".join(node.name for node in unclean)
        return (
            f"\n  could not be cleaned from here: {names}; ranks there end by themselves within "
            f"{self.crew.limits.silence_s + self.crew.limits.grace_s:g} s"
        )

    def _look_up(self) -> None:
        """Raise `Interrupted` where a signal has come."""
        if self._signals and not self._ending:
            raise Interrupted(self._signals[0])

    @contextmanager
    def _heeding_signals(self) -> Iterator[None]:
        def note(number: int, frame: FrameType | None) -> None:
            self._signals.append(number)

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
        before = {number: signal.signal(number, note) for number in numbers}
        try:
            yield
        finally:
            # The run is over: what comes now must not spoil its message.
            for number in before:
                signal.signal(number, signal.SIG_IGN)
