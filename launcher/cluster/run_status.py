"""`RunStatus`: the current status of a run, in a file next to its logs, for `launch top` and other programs.

The front end replaces `status.json` atomically, once a second. The file is complete at any time, and remains
after the run has ended. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from launcher.cluster.node_spec import open_log
from launcher.cluster.secret import masked
from launcher.monitor.flight_recorder import StepCounters
from launcher.monitor.stragglers import StragglerDetector

FILE, STACKS, ASKED = "status.json", "stacks.txt", "stacks.asked"
"""In the log directory: the status; the stacks of all ranks; the file whose existence requests them."""
EVERY_S = 1.0
MOST_MESSAGES = 50
RESUME = "--resume"
LONG = 40
"""Optimizer steps for which a rank must be slow before a run restarts without it."""
_STAGE = re.compile(r"stage \d+")
logger = logging.getLogger("launcher")


@dataclass
class RankStatus:
    """The status of a rank.

    Attributes:
        place: coordinates in the mesh; "" if there is only data parallelism.
        doing: the collective that it began last.
        since_s: seconds since then.
    """

    rank: int
    host: str
    pid: int = 0
    place: str = ""
    doing: str = ""
    since_s: float = 0.0
    counters: StepCounters | None = None


@dataclass
class RunStatus:
    """The status of a run, across all its attempts.

    Args:
        command: the command that was started, for display.
    """

    command: str = ""
    state: str = "starting"
    """starting, running, restarting, or how it ended: completed, failed, interrupted."""
    restarts: int = 0
    started_at: float = field(default_factory=time.time)
    ranks: list[RankStatus] = field(default_factory=list)
    messages: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=MOST_MESSAGES))
    """(seconds since the epoch, text)."""
    _file: Path | None = None
    _written: float = 0.0
    _begun: bool = False
    _detector: StragglerDetector | None = None

    def begin(
        self, log_dir: str, hosts: Sequence[tuple[str, int]], places: Sequence[str], restarts: int
    ) -> None:
        """Record that the ranks have started.

        Args:
            hosts: the nodes and their numbers of ranks, in rank order.
            places: the mesh coordinates of each rank; empty if there is only dp.
        """
        names = [host for host, ranks in hosts for _ in range(ranks)]
        where = list(places) or [""] * len(names)
        self.ranks = [RankStatus(rank, host, place=where[rank]) for rank, host in enumerate(names)]
        # Pipeline stages have different layers: only ranks of the same stage have the same work.
        stages = [match[0] if (match := _STAGE.search(place)) else "" for place in where]
        self._detector = StragglerDetector(stages)
        self._file, self.state, self.restarts = Path(log_dir) / FILE, "running", restarts
        if restarts:
            self.say(f"restart {restarts}")
        elif not self._begun:
            self._remember()
        self._begun = True

    def take(self, ranks: Sequence[Mapping[str, Any]]) -> None:
        """Record what an agent reports about its ranks, and detect slow ones."""
        for told in ranks:
            if not 0 <= told["rank"] < len(self.ranks):
                continue
            status = self.ranks[told["rank"]]
            status.pid, status.doing, status.since_s = told["pid"], told["doing"], told["since_s"]
            if told["counters"] is not None:
                status.counters = StepCounters(*told["counters"])
        self._look()

    def say(self, text: str) -> None:
        """Keep a message for viewers of the run."""
        self.messages.append((time.time(), masked(text)))

    def _remember(self) -> None:
        """Take over the messages of the run that this one resumes, so that its history stays visible."""
        if self._file is None or RESUME not in self.command.split():
            return
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            before = json.loads(self._file.read_text(encoding="utf-8"))["messages"]
            kept = [(float(each["at"]), str(each["text"])) for each in before][-MOST_MESSAGES:]
            self.messages.extendleft(reversed(kept[: MOST_MESSAGES - len(self.messages)]))

    def tick(self) -> None:
        """Write the file if the last write was at least `EVERY_S` ago."""
        if self._file is not None and time.monotonic() - self._written >= EVERY_S:
            self._written = time.monotonic()
            self._write(self._file)

    def slow_rank(self) -> tuple[int, str] | None:
        """Return a rank that has been slow for so long that the run may exclude it, and how slow it is."""
        found = self._detector.found.values() if self._detector is not None else ()
        return next(((slow.rank, str(slow)) for slow in found if slow.steps >= LONG), None)

    def end(self, state: str, message: str | None) -> None:
        """Record that the run, or one attempt of it, has ended.

        Args:
            state: the final state; "restarting" if another attempt follows.
        """
        self.state = state
        if message:
            self.say(message)
        if self._file is not None:
            self._write(self._file)

    @property
    def file(self) -> Path | None:
        """Return the path of the file; None before ranks have started."""
        return self._file

    def asked_for_stacks(self) -> bool:
        """Return whether a viewer has requested the stacks of the ranks; True once per request."""
        if self._file is None:
            return False
        try:
            os.unlink(self._file.with_name(ASKED))
        except OSError:
            return False
        return True

    def as_json(self) -> dict[str, Any]:
        """Return the content of the file."""
        slow = self._detector.found if self._detector is not None else {}
        ranks = [
            {
                **{key: getattr(rank, key) for key in ("rank", "host", "pid", "place", "doing", "since_s")},
                "counters": rank.counters and asdict(rank.counters),
                "slow": asdict(slow[rank.rank]) if rank.rank in slow else None,
            }
            for rank in self.ranks
        ]
        return {
            "version": 1,
            "command": self.command,
            "state": self.state,
            "restarts": self.restarts,
            "started_at": self.started_at,
            "written_at": time.time(),
            "messages": [{"at": at, "text": text} for at, text in self.messages],
            "ranks": ranks,
        }

    def _look(self) -> None:
        if self._detector is None:
            return
        newest = {status.rank: status.counters for status in self.ranks if status.counters is not None}
        for slow in self._detector.look(newest):
            text = f"{self.ranks[slow.rank].host} rank {slow.rank} is slow: {slow}"
            self.say(text)
            logger.warning("%s", text)
            self._written = 0.0

    def _write(self, file: Path) -> None:
        temporary = file.with_name(f".{FILE}.tmp-{os.getpid()}")
        with contextlib.suppress(OSError):  # a full disk must not end the run
            file.parent.mkdir(parents=True, exist_ok=True)  # the logs may exist on the nodes only
            text = json.dumps(self.as_json()) + "\n"
            temporary.unlink(missing_ok=True)
            with open_log(temporary, keep=False) as opened:  # private, like the logs
                opened.write(text.encode())
            os.replace(temporary, file)
