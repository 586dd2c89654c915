"""The agent: the process that starts and monitors the ranks of one node, be it remote or this machine.

It reads commands as lines from its standard input and reports events as lines on its standard output
(`wire.py`). It never outlives the front end: when its input ends or falls silent, it ends its ranks. It
consists of two processes: the agent itself, and a guard that cleans up if the agent is killed.
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
"""Bytes of rank output that may be in flight. The rest stays in the logs, or blocks a rank that writes to a
terminal, until the front end has printed it."""
STACKS_S = 0.5
"""How long ranks have to write their stacks. The kernel delivers the signal even while Python is blocked."""
STATUS_S = 0.5
"""Interval between reports of what the ranks are doing."""
LOST = 3
"""Exit code of an agent that has lost its front end."""


def serve(hello: Message) -> NoReturn:
    """Fork the agent and guard it. Called by `bootstrap.py`."""
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
    """Create a directory in memory for the state from which ranks resume in the next attempt
    (`peer_memory.py`)."""
    try:
        memory = Scratch(Path("/dev/shm"), "launch-memory-", "agent")
    except OSError:  # ranks that need the directory report that it is missing
        os.environ.pop(MEMORY_VARIABLE, None)
        return None
    os.environ[MEMORY_VARIABLE] = str(memory.path)
    return memory


def _guard(agent: int, memory: Scratch | None) -> NoReturn:
    """Wait for the agent, then end every process that it has left behind."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # ssh, srun and mpirun send these when the front end exits; the agent then ends its ranks in order.
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
    with contextlib.suppress(ProcessLookupError):  # the agent has ended; the guard cleans up next
        os.kill(agent, number)


class Agent:
    """Executes commands from the front end, one message each, and reports events.

    Args:
        hello: the front end's first message: `silence_s` is how long the front end may be silent, `beat_s`
            the heartbeat interval of both sides, `session` the message signers of a TCP connection
            (`handshake.py`).
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
        """Serve until the front end is gone or sends no more commands, and return the exit code."""
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
        """Execute the messages that have arrived, and return them."""
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
        # Imported lazily: the import must not delay the readiness check of a large cluster.
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
        """Claim the run's directory before anything in it is touched. Return a note about its last owner, if
        any."""
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
        """Kill the ranks without a grace period if another run owns the directory: they might write to it."""
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
        """Report what each rank is doing, every `STATUS_S` seconds."""
        now = time.monotonic()
        if now - self._told >= STATUS_S and not self._out.full:
            self._told = now
            self._say("status", ranks=ranks.status())

    def _look(self) -> None:
        """Poll the ranks and all background work, and report what has changed."""
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
                self._say("failing")  # the other nodes need not wait until all ranks have ended on this one
            self._finish(processes.GRACE_S)

    def _show(self) -> None:
        if self._ranks is not None:
            self._shows_all(self._ranks)

    def _shows_all(self, ranks: LocalRanks) -> bool:
        """Send as much output as the window allows. Return whether none is left."""
        while self._unshown < WINDOW and not self._out.full:
            pieces = ranks.output()
            if not pieces:
                return True
            for rank, data in pieces:
                self._unshown += len(data)
                self._say("output", rank=rank, text=text_of(data))
        return False

    def _drain(self, ranks: LocalRanks) -> None:
        """Send the remaining output at the pace of its reader, unless the front end is gone or in a hurry."""
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
        # Sent regardless of other messages: only this one reports how long the ranks have been stalled.
        if time.monotonic() - self._beaten >= self._beat_s:
            self._beaten = time.monotonic()
            self._say("alive", stalled_s=self._ranks.stalled_s() if self._ranks is not None else None)

    def _finish(self, grace_s: float) -> None:
        """End the ranks and report how they ended."""
        if self._ranks is None:
            return
        ranks, complete = self._ranks, self._ranks.poll() is True
        self._say("status", ranks=ranks.status())
        self._ranks = None  # messages that arrive from now on are not for these ranks
        ranks.finish(grace_s, self._is_hurried)
        self._drain(ranks)
        ranks.close()
        failure = ranks.failure()
        complete = complete and failure is None
        if complete:
            self._give_back()  # before the report: its receiver may start the next run at once
        self._say(
            "ended",
            complete=complete,
            failure=failure and failure.to_json(),
            now=time.time(),
        )

    def _is_hurried(self) -> bool:
        """Return whether the front end wants the ranks killed before their grace period is over."""
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
    sys.exit("this program is started by the front end: launch --hostfile ...")
