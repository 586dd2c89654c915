"""The agent: what runs on each node of a run, started there by the front end, and on this machine alike.

It reads what to do as lines from its standard input and tells what happens as lines on its standard output
(`wire.py`). It never outlives the front end: when its input ends or falls silent, it ends its ranks. It is two
processes: a guard that waits, so that nothing is left when somebody kills the agent itself, and the agent.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from launcher.cluster import facts, probe, processes
from launcher.cluster.node_spec import MEMORY_VARIABLE
from launcher.cluster.wire import Message, MessageReader, MessageWriter, text_of
from launcher.errors import LauncherError
from launcher.scratch import Scratch

if TYPE_CHECKING:
    from launcher.cluster.local import LocalRanks
    from launcher.cluster.node_spec import NodeSpec
    from launcher.cluster.store import SyncedCopyWriter
    from launcher.owner import Ownership

POLL_S = 0.05
DRAIN_S = 2.0
WINDOW = 1 << 20
"""Bytes of output that may be on their way; the rest stays in the logs, or holds up a rank on a terminal, until the
front end has shown them."""
STACKS_S = 0.5
"""How long ranks have to write their stacks; the kernel delivers the signal also where Python is blocked."""
STATUS_S = 0.5
"""How often the front end hears what the ranks do."""
LOST = 3
"""Exit code of an agent that the front end does not talk to any more."""


def serve(hello: Message) -> NoReturn:
    """Become the agent (see `bootstrap.py`)."""
    processes.adopt_orphans()
    memory = _memory_of_node()
    agent = os.fork()
    if agent == 0:
        os.setpgid(0, 0)
        processes.adopt_orphans()
        code = LOST
        try:
            code = Agent(hello).run()
        finally:
            os._exit(code)
    _guard(agent, memory)


def _memory_of_node() -> Scratch | None:
    """Make a directory in memory, for ranks to keep what the next attempt goes on from (`peer_memory.py`)."""
    try:
        memory = Scratch(Path("/dev/shm"), "launch-memory-", "agent")
    except OSError:  # ranks tell, where they want it
        os.environ.pop(MEMORY_VARIABLE, None)
        return None
    os.environ[MEMORY_VARIABLE] = str(memory.path)
    return memory


def _guard(agent: int, memory: Scratch | None) -> NoReturn:
    """Wait for the agent, and end what it leaves."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # ssh, srun and mpirun send these when the front end goes; the agent then ends its ranks in order.
        signal.signal(number, lambda number, _: _forward(agent, number))
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    _, status = os.waitpid(agent, 0)
    processes.end_descendants(0)
    if memory is not None:
        memory.close()
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _forward(agent: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended; the guard goes on to end what it left
        os.kill(agent, number)


class Agent:
    """Takes orders from the front end, one message each, and reports.

    Args:
        hello: the front end's first line: `silence_s` is how long it may say nothing, `beat_s` how often either side
            says that it lives, `session` the seals of a TCP connection (`handshake.py`).
    """

    def __init__(self, hello: Message) -> None:
        session = hello.get("session")
        self._in = MessageReader(0, session and session.takes)
        self._out = MessageWriter(1, session and session.sends)
        self._silence_s, self._beat_s = float(hello["silence_s"]), float(hello["beat_s"])
        self._heard = self._beaten = self._told = time.monotonic()
        self._ranks: LocalRanks | None = None
        self._ownership: Ownership | None = None
        self._over = False
        self._seen_parent = os.getppid()
        self._port = probe.ProbeServer()
        self._tries: probe.ProbeClient | None = None
        self._copying: SyncedCopyWriter | None = None
        self._stacks_due: float | None = None
        self._unshown, self._patient = 0, True
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._leave)
        self._say("here", facts=facts.collect(hello))

    def run(self) -> int:
        """Serve until the front end has gone, or has no more orders; the exit code."""
        try:
            return self._serve()
        finally:
            self._give_back()

    def _serve(self) -> int:
        while not self._over:
            waiting = [1] if self._out.waiting else []
            select.select([0], waiting, [], POLL_S)
            self._listen()
            self._out.flush()
            self._look()
            if self._deserted() and not self._over:
                self._finish(processes.GRACE_S)
                return LOST
        deadline = time.monotonic() + DRAIN_S
        while self._out.waiting and time.monotonic() < deadline:
            select.select([], [1], [], POLL_S)
            self._out.flush()
        return 0

    def _listen(self) -> list[Message]:
        """Obey the messages that have come."""
        messages = self._in.read()
        for message in messages:
            self._heard = time.monotonic()
            self._obey(message)
        return messages

    def _obey(self, message: Message) -> None:
        match message["do"]:
            case "start":
                self._start(message["share"])
            case "stop":
                self._patient = message["patient"]
                self._finish(float(message["grace_s"]))
                self._say("stopped")
            case "signal" if self._ranks is not None:
                processes.signal_all(self._ranks.pids, message["number"])
            case "stacks" if self._ranks is not None:
                self._ranks.request_stacks()
                self._stacks_due = time.monotonic() + STACKS_S
            case "resize" if self._ranks is not None:
                self._ranks.resize(message["rows"], message["columns"])
            case "listen":
                self._say("listening", **self._port.open(message["addr"], message["port"], message["word"]))
            case "reach":
                self._tries = probe.ProbeClient(message["targets"])
            case "copy":
                from launcher.cluster.store import SyncedCopyWriter

                self._copying = SyncedCopyWriter(message["manifest"])
            case "content" if self._copying is not None:
                self._copying.take(message["digest"], message["data"])
            case "build" if self._copying is not None:
                self._copying.build()
            case "shown":
                self._unshown -= message["size"]
            case "bye":
                self._over = True

    def _start(self, share: Message) -> None:
        # Imported now: on a large cluster nobody waits for it before all nodes are known to be ready.
        from launcher.cluster.local import LocalRanks
        from launcher.cluster.node_spec import NodeSpec

        self._port.leave()
        self._unshown, self._patient = 0, True
        try:
            orders = NodeSpec(**share)
            note = self._own(orders)
            self._ranks = LocalRanks(orders)
        except LauncherError as error:
            self._refuse(error)
        else:
            self._say("started", pids=self._ranks.pids, note=note)

    def _own(self, share: NodeSpec) -> str | None:
        """Take the run's directory before anything in it is touched; what is to be told of its last owner."""
        if share.owned is None or share.first_rank or self._ownership is not None:
            return None
        from launcher import owner

        notes: list[str] = []
        self._ownership = owner.take(Path(share.owned), share.run, notes.append)
        return notes[-1] if notes else None

    def _give_back(self) -> None:
        if self._ownership is not None:
            self._ownership.give_back()
            self._ownership = None

    def _check_ownership(self) -> None:
        """Kill ranks without a grace where another run has the directory: they might write there."""
        if self._ownership is None or self._ranks is None:
            return
        try:
            self._ownership.check()
        except LauncherError as error:
            self._refuse(error)
            self._finish(0)

    def _refuse(self, error: LauncherError) -> None:
        self._say("refused", what=error.what, where=error.where, fix=error.fix)

    def _tell_status(self, ranks: LocalRanks) -> None:
        """Twice a second: what the ranks do, for who looks at the run."""
        now = time.monotonic()
        if now - self._told >= STATUS_S and not self._out.full:
            self._told = now
            self._say("status", ranks=ranks.status())

    def _look(self) -> None:
        """See how the ranks are, and say so."""
        self._beat()
        now = time.monotonic()
        if self._tries is not None and (found := self._tries.found()) is not None:
            self._tries = None
            self._say("reached", found=found)
        for news in self._copying.news() if self._copying is not None else ():
            self._say(news.pop("is"), **news)
        self._check_ownership()
        if self._ranks is None:
            return
        if self._stacks_due is not None and now >= self._stacks_due:
            self._stacks_due = None
            self._say("stacks", states=self._ranks.states())
        ended = self._ranks.poll()
        self._tell_status(self._ranks)
        self._show()
        if ended is not None:
            if not ended:
                self._say("failing")  # the others need not wait until all are ended here
            self._finish(processes.GRACE_S)

    def _show(self) -> None:
        if self._ranks is not None:
            self._shows_all(self._ranks)

    def _shows_all(self, ranks: LocalRanks) -> bool:
        """Show what may be sent now; whether that is all that there is."""
        while self._unshown < WINDOW and not self._out.full:
            pieces = ranks.output()
            if not pieces:
                return True
            for rank, data in pieces:
                self._unshown += len(data)
                self._say("output", rank=rank, text=text_of(data))
        return False

    def _drain(self, ranks: LocalRanks) -> None:
        """Show what is left to show, at whatever speed it is taken, unless the front end goes or is in a hurry."""
        if self._shows_all(ranks):
            return
        self._say("over")
        deadline = float("inf")
        while not (self._shows_all(ranks) or self._deserted() or time.monotonic() > deadline):
            select.select([0], [1] if self._out.waiting else [], [], POLL_S)
            if self._is_hurried() or self._over:
                return
            if not self._patient:
                deadline = min(deadline, time.monotonic() + DRAIN_S)
            self._out.flush()
            self._beat()

    def _beat(self) -> None:
        # Whatever else was said meanwhile: this tells whether ranks hang.
        if time.monotonic() - self._beaten >= self._beat_s:
            self._beaten = time.monotonic()
            self._say("alive", stalled_s=self._ranks.stalled_s() if self._ranks is not None else None)

    def _finish(self, grace_s: float) -> None:
        """End the ranks and tell how they ended."""
        if self._ranks is None:
            return
        ranks, complete = self._ranks, self._ranks.poll() is True
        self._say("status", ranks=ranks.status())
        self._ranks = None  # what comes meanwhile is not for them
        ranks.finish(grace_s, self._is_hurried)
        self._drain(ranks)
        ranks.close()
        failure = ranks.failure()
        complete = complete and failure is None
        if complete:
            self._give_back()  # now: who waits for the end of this run may start the next one
        self._say(
            "ended",
            complete=complete,
            failure=failure and failure.to_json(),
            now=time.time(),
        )

    def _is_hurried(self) -> bool:
        """Return whether the front end, while the ranks have their grace, wants them killed."""
        return any(message["do"] == "stop" and not message["grace_s"] for message in self._listen())

    def _deserted(self) -> bool:
        return (
            self._in.ended
            or self._out.broken
            or time.monotonic() - self._heard > self._silence_s
            or os.getppid() != self._seen_parent
        )

    def _leave(self, number: int, frame: object) -> None:
        self._in.ended = True

    def _say(self, kind: str, /, **more: object) -> None:
        self._out.send({"is": kind, **more})


if __name__ == "__main__":
    sys.exit("the front end starts this program: launch --hostfile ...")
