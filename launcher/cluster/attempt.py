"""One attempt of a run: all ranks are started, monitored, and ended together."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace

from launcher.cluster import hang
from launcher.cluster.console import ConsoleWriter
from launcher.cluster.failure import SAID, Failure, describe, exit_code
from launcher.cluster.node import Node
from launcher.cluster.node_group import NodeGroup
from launcher.cluster.node_spec import NodeSpec
from launcher.cluster.run_status import STACKS, RunStatus
from launcher.cluster.signals import Interrupted, Signals
from launcher.cluster.wire import Message, bytes_of
from launcher.errors import ConfigError

STACKS_S = 3.0
"""How long agents may take to report the stacks of their ranks."""
AFTER_GRACE_S = 4.0
"""How much longer than the grace period an agent may take to confirm that its ranks have ended."""
HURRY_S = 2.0
"""The same limit after a second signal, which kills the ranks."""
LAST_OUTPUT_S = 2.0
"""How long to wait for output after the user has stopped the run."""
DOUBTFUL_S = 1.5
"""How long to wait for a node that had missed heartbeats before the run was ended."""
LOSS_COMES_FIRST_S = 1.0
"""A lost node counts as the cause of failures that other ranks recorded up to this long before the loss was
noticed."""
logger = logging.getLogger("launcher")


@dataclass(frozen=True)
class RunOutcome:
    """The outcome of a run."""

    exit_code: int
    message: str | None = None
    """The message for the user if the run failed or was interrupted."""
    saved: bool = False
    """The run was stopped, and all ranks ended in time, having saved their checkpoint."""


@dataclass(frozen=True)
class EndCause:
    """The reason why a run ends early."""

    time: float
    """Seconds since the epoch, by the front end's clock."""
    message: str
    exit_code: int
    node: Node
    can_retry: bool = True
    lost: bool = False
    slow: bool = False
    """The node is reachable but slow; the next attempt runs without it."""


@dataclass
class LogOptions:
    """How messages refer to the ranks of a run."""

    several: bool = False
    """Messages include the names of hosts."""
    places: Sequence[str] = ()
    """The coordinates of each rank in the mesh, in words."""
    shown: dict[int, str] = field(default_factory=dict)
    """The name of each rank whose output is printed; if empty, the output of rank 0 is printed unchanged."""
    shows_rank_0: bool = False
    """The output of rank 0 goes to the terminal unchanged."""


@dataclass(frozen=True)
class EndPolicy:
    """Specifies when a run is ended, and some of its exit codes."""

    hang_s: float = 0.0
    """Seconds without progress on any rank after which the run counts as hung; 0 disables the check."""
    term_grace_s: float = 0.0
    """Seconds that ranks have after a SIGTERM to the front end before they are ended."""
    saved_exit_code: int = 128 + signal.SIGTERM
    """Exit code if all ranks ended cleanly within that time: everything has been saved."""


class Attempt:
    """Runs the ranks of all nodes, from their start to their end.

    Args:
        node_group: the nodes, connected.
        shares: the specification of each node.
        log_options: how messages refer to the ranks.
        policy: see `EndPolicy`.
        signals: the signals that the front end receives.
        status: the status of the run, published for viewers.
        may_leave: returns whether the next attempt can do without a slow node.
    """

    def __init__(
        self,
        node_group: NodeGroup,
        shares: Sequence[NodeSpec],
        log_options: LogOptions,
        policy: EndPolicy,
        signals: Signals,
        status: RunStatus,
        may_leave: Callable[[Node], bool] = lambda _: False,
    ) -> None:
        self.node_group, self.shares, self.log_options, self.policy = node_group, shares, log_options, policy
        self.signals, self.console, self.log_dir = (
            signals,
            ConsoleWriter(log_options.shown),
            shares[0].log_dir,
        )
        self.status, self.may_leave = status, may_leave
        self.causes: list[EndCause] = []
        self._stalled: dict[Node, float] = {}
        self._hurried = False
        self._waiting: list[tuple[Node, NodeSpec]] = []
        """The other nodes, which start after the first one, because that one claims the run's directory."""
        self._over: set[Node] = set()
        """Nodes whose ranks have ended, but whose output is not printed completely."""

    def run(self) -> tuple[RunOutcome, EndCause | None]:
        """Start all ranks and wait until they end. The returned cause is None unless something failed."""
        size = self.console.size if self.shares[0].shown else None
        number = None
        try:
            for node in self.node_group.nodes:
                node.running, node.complete, node.pids = False, False, []
            (first, share), *self._waiting = zip(self.node_group.nodes, self.shares, strict=True)
            self._start(first, replace(share, terminal=size))
            size = self._watch(size)
        except Interrupted as error:
            number = error.number
            if number == signal.SIGTERM and self.policy.term_grace_s:
                self._let_finish()
        unclean = self._end(patient=number is None)
        self._show_the_rest(patient=number is None)
        left = self._told(unclean)
        unfinished = [node for node in self.node_group.nodes if not node.complete]
        if number is not None:
            how = " and killed by the second signal" if self._hurried else ""
            saved = number == signal.SIGTERM and not unfinished
            how = "; all ranks ended cleanly" if saved else how
            code = self.policy.saved_exit_code if saved else 128 + number
            message = f"stopped by {number.name}{how}; logs: {self.log_dir}{left}"
            return RunOutcome(code, message, saved), None
        if not self.causes and not unfinished:
            return RunOutcome(0), None
        if not self.causes:
            silent = ", ".join(node.name for node in unfinished)
            return RunOutcome(
                1, f"the ranks of {silent} ended without reporting a status; logs: {self.log_dir}{left}"
            ), None
        cause = min(self.causes, key=lambda c: c.time)
        return RunOutcome(cause.exit_code, cause.message + left), cause

    @staticmethod
    def _start(node: Node, share: NodeSpec) -> None:
        node.running = True
        node.send("start", share=asdict(share))

    def _watch(self, size: tuple[int, int] | None) -> tuple[int, int] | None:
        """Wait until every node has completed or one has failed. Return the terminal's last known size."""
        failing = False
        while any(node.running for node in self.node_group.nodes) and not (failing or self.causes):
            self.console.flush()
            for node, message in self.node_group.events():
                failing = failing or message["is"] == "failing"
                self._take(node, message)
            self.signals.look_up()
            self.status.tick()
            if self.status.asked_for_stacks():
                self._write_stacks()
            if (cause := self._slow()) is not None:
                self.causes.append(cause)
            stalled = [
                self._stalled[node]
                for node in self.node_group.nodes
                if node.running and node in self._stalled
            ]
            if self.policy.hang_s and stalled and min(stalled) >= self.policy.hang_s:
                self.causes.append(self._hang())
            if size is not None and self.console.size not in (None, size):
                size = self.console.size or size
                self.node_group.nodes[0].send("resize", rows=size[0], columns=size[1])
        return size

    def _take(self, node: Node, message: Message) -> None:
        match message["is"]:
            case "alive" if message["stalled_s"] is not None:
                self._stalled[node] = message["stalled_s"]
            case "status":
                self.status.take(message["ranks"])
            case "started":
                if not node.pids and node is self.node_group.nodes[0]:
                    hosts = [
                        (n.name, s.ranks) for n, s in zip(self.node_group.nodes, self.shares, strict=True)
                    ]
                    share = self.shares[0]
                    self.status.begin(share.log_dir, hosts, self.log_options.places, share.attempt)
                node.pids = message["pids"]
                if note := message.get("note"):
                    logger.warning("%s", note)
                waiting, self._waiting = self._waiting, []
                for other, share in waiting:
                    self._start(other, share)
            case "output":
                data = bytes_of(message["text"])
                # Flow control: a node may have only `agent.WINDOW` bytes in flight that are not printed yet.
                self.console.show(message["rank"], data, lambda: node.send("shown", size=len(data)))
            case "over":
                self._over.add(node)
            case "refused":
                node.running = False
                error = ConfigError(message["what"], where=message["where"], fix=message["fix"])
                host = f"{node.name}: " if self.log_options.several else ""
                self.causes.append(EndCause(time.time(), f"{host}{error}", 2, node, can_retry=False))
            case "ended":
                node.running, node.complete = False, message["complete"]
                if message["failure"]:
                    failure = Failure.from_json(message["failure"])
                    # Clocks differ between nodes: only use differences between times of the same node.
                    when = time.time() - (message["now"] - failure.time)
                    self.causes.append(self._failed(node, failure, when))
            case "lost":
                node.running = False
                ranks = (
                    f"{node.name} was lost: {node.lost}"
                    if self.log_options.several
                    else f"the agent was lost: {node.lost}"
                )
                self.causes.append(EndCause(time.time() - LOSS_COMES_FIRST_S, ranks, 1, node, lost=True))

    def _let_finish(self) -> None:
        """Forward SIGTERM and give the ranks `term_grace_s` seconds to save a checkpoint, or until another
        signal arrives."""
        self._waiting = []
        self.signals.held = True
        logger.warning("SIGTERM: ranks have %g s to save a checkpoint", self.policy.term_grace_s)
        self.node_group.tell(self.node_group.nodes, "signal", number=int(signal.SIGTERM))
        until = time.monotonic() + self.policy.term_grace_s
        while (
            any(node.running for node in self.node_group.nodes)
            and time.monotonic() < until
            and len(self.signals.numbers) < 2
        ):
            self.console.flush()
            for node, message in self.node_group.events():
                self._take(node, message)

    def _slow(self) -> EndCause | None:
        """Return the cause to end this attempt if a node has long been slow and the next attempt can do
        without it."""
        if (found := self.status.slow_rank()) is None:
            return None
        rank, how = found
        node = next(
            node
            for node, share in zip(self.node_group.nodes, self.shares, strict=True)
            if share.first_rank <= rank < share.first_rank + share.ranks
        )
        if not self.may_leave(node):
            return None
        return EndCause(time.time(), f"{node.name} rank {rank} is slow: {how}", 1, node, slow=True)

    def _write_stacks(self) -> None:
        """Write the stacks of all ranks to a file, as a viewer of the run has requested."""
        states, _ = self._stacks()
        hang.write(states, self.log_dir, STACKS)

    def _hang(self) -> EndCause:
        """Collect the state of every rank, and return the hang as the cause of the end."""
        states, asked = self._stacks()
        hang.write(states, self.log_dir)
        return EndCause(time.time(), hang.describe(states, self.log_dir), 1, asked[0])

    def _stacks(self) -> tuple[list[hang.RankState], list[Node]]:
        """Return the state of every rank, and the nodes that were queried."""
        asked = [node for node in self.node_group.nodes if node.running]
        self.node_group.tell(asked, "stacks")
        states: list[hang.RankState] = []
        answered: set[Node] = set()
        until = time.monotonic() + STACKS_S
        while len(answered) < len(asked) and time.monotonic() < until:
            for node, message in self.node_group.events():
                if message["is"] == "stacks":
                    answered.add(node)
                    states += [hang.RankState(host=node.name, **state) for state in message["states"]]
                else:
                    self._take(node, message)
        states.sort(key=lambda state: state.rank)
        return states, asked

    def _failed(self, node: Node, failure: Failure, when: float) -> EndCause:
        message = describe(
            failure,
            log_was_shown=failure.rank == 0 and self.log_options.shows_rank_0,
            place=self.log_options.places[failure.rank] if self.log_options.places else "",
            host=node.name if self.log_options.several else "",
        )
        mistake = failure.record is not None and failure.record.kind in SAID
        return EndCause(when, message, exit_code(failure), node, can_retry=not mistake)

    def _end(self, *, patient: bool) -> list[Node]:
        """End all running ranks. Return the nodes whose ranks are not known to have ended.

        Args:
            patient: wait for the last output of the ranks, at whatever pace it is read.
        """
        self.signals.held = self.node_group.ending = True
        self._waiting = []
        grace = self.node_group.timeouts.grace_s
        running = [node for node in self.node_group.nodes if node.running]
        self.node_group.tell(running, "stop", grace_s=grace, patient=patient)
        began = time.monotonic()
        deadline = began + grace + AFTER_GRACE_S
        # Nodes that have already missed heartbeats are probably gone: all are, if this machine is cut off.
        doubtful = [node for node in running if began - node.heard > 2.5 * self.node_group.timeouts.beat_s]
        while self._waits_for(running, patient=patient and not self._hurried, deadline=deadline):
            self.console.flush()
            for node, message in self.node_group.events():
                self._take(node, message)
            if time.monotonic() - began > DOUBTFUL_S:
                for node in doubtful:
                    if node.running and node.heard < began and not node.here:
                        node.give_up("it has not answered for a while")
            if len(self.signals.numbers) > (0 if patient else 1) and not self._hurried:
                self._hurried = True
                self.node_group.tell(running, "stop", grace_s=0.0, patient=False)
                deadline = min(deadline, time.monotonic() + HURRY_S)
        for node in running:
            if node.running:
                waited = time.monotonic() - began
                node.give_up(f"it did not confirm within {waited:.0f} s that its ranks had ended")
        return [node for node in self.node_group.nodes if node.lost is not None]

    def _waits_for(self, running: Sequence[Node], *, patient: bool, deadline: float) -> bool:
        """Return whether to keep waiting for nodes to report how their ranks ended: until the deadline or, if
        `patient`, as long as they have output to send."""
        still = [node for node in running if node.running]
        silence_s = self.node_group.timeouts.silence_s
        for node in still:
            if node in self._over and not node.here and time.monotonic() - node.heard > silence_s:
                node.give_up(f"it was silent for {silence_s:g} s while sending its last output")
        now = time.monotonic()
        return any(now < deadline or (patient and node in self._over) for node in still if node.running)

    def _show_the_rest(self, *, patient: bool) -> None:
        """Wait until all output is printed, but only for `LAST_OUTPUT_S` unless `patient`."""
        self.console.finish()
        until = time.monotonic() + (float("inf") if patient else LAST_OUTPUT_S)
        asked = len(self.signals.numbers)
        while not self.console.finished and time.monotonic() < until and len(self.signals.numbers) == asked:
            for _ in self.node_group.events():
                pass
        self.console.flush()

    def _told(self, unclean: list[Node]) -> str:
        if not unclean:
            return ""
        names = ", ".join(f"{node.name} ({_processes(node.pids)})" for node in unclean)
        return (
            f"\n  could not clean up {names}; ranks there will exit on their own within "
            f"{self.node_group.timeouts.silence_s + self.node_group.timeouts.grace_s:g} s"
        )


def _processes(pids: Sequence[int]) -> str:
    return f"processes {', '.join(map(str, pids))}" if pids else "processes unknown"
