"""Decides, in one place for all ranks, which replicas of a run train together from one step to the next.

A replica trains alone but for the mean of gradients, and may die. Its ranks ask here before they first train, and again
whenever an exchange with the other replicas has failed, or another replica waits to join. Once all ranks of all
replicas that are still there have asked, an epoch begins: its members, and where their ranks meet.

[Note: the step that one has made, and another has not]

In a step, replicas exchange gradients; then each tells the others that it has the result, and makes the step when all
have told it so. Whoever makes a step therefore knows that every other member has its result. A replica that dies
between two of these messages leaves some members behind: they have the result, and have not heard from it. On the next
epoch they are told to make the step as well. Where no member has made it, all forget the result, and exchange the
gradients, which they still have, without the one that has died.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]
Outgoing: TypeAlias = tuple[int, int, Message]
"""(Replica, rank in it, what it is told)."""


@dataclass
class Question:
    """The request of a rank.

    Args:
        step: of its weights.
        kind: "fresh": it has just started; "boundary": between two steps; "failed": within the step after `step`.
        has_result: of that step.
        address: where it waits for others, if it is the first of them.
    """

    step: int
    kind: str
    has_result: bool
    address: tuple[str, int]


@dataclass
class Replica:
    """The state of one replica, as far as it is known."""

    attempt: int = -1
    present: set[int] = field(default_factory=set)
    """Ranks that are connected."""
    asked: dict[int, Question] = field(default_factory=dict)
    member: bool = False
    ended: bool = False
    """It does not come again."""
    since: float = 0.0
    """When the first of its ranks asked."""

    def leave(self) -> None:
        self.present, self.asked, self.member = set(), {}, False


class Membership:
    """The decisions. All times are seconds of one clock, and nothing is ever waited for here.

    Args:
        replicas: how many there are.
        ranks: of each.
        start_s: how long a run without members waits for replicas that are not there, once one is ready.
        answer_s: how long members wait for one that is connected and does not ask, before they go on without it. It may
            be computing: longer than a step.

    Attributes:
        over: one replica has written what the run leaves: all others end.
        closed: nobody joins any more.
    """

    def __init__(self, replicas: int, ranks: int, start_s: float = 600.0, answer_s: float = 120.0) -> None:
        self.replicas = [Replica() for _ in range(replicas)]
        self.ranks, self.start_s, self.answer_s = ranks, start_s, answer_s
        self.epoch = 0
        self.over = self.closed = False
        self._told = 0
        self._ending: dict[int, set[int]] = {}
        self._writer: int | None = None

    # ---- what happens -----------------------------------------------------------------------

    def connected(self, replica: int, rank: int, attempt: int) -> None:
        one = self.replicas[replica]
        if attempt > one.attempt:
            one.leave()
            one.attempt = attempt
        one.present.add(rank)

    def is_current(self, replica: int, attempt: int) -> bool:
        """Return whether ranks of that attempt still count."""
        return attempt == self.replicas[replica].attempt

    def gone(self, replica: int, attempt: int) -> None:
        """A rank has gone: its replica cannot go on."""
        if self.is_current(replica, attempt):
            self.replicas[replica].leave()
            self.replicas[replica].attempt += 1  # what others of its ranks say does not count
            self._ending.pop(replica, None)
            if self._writer == replica:
                self._writer = None

    def ended(self, replica: int) -> None:
        """The replica has ended, and is not started again."""
        self.replicas[replica].leave()
        self.replicas[replica].ended = True

    def asked(self, replica: int, rank: int, question: Question, now: float) -> None:
        one = self.replicas[replica]
        one.since = one.since if one.asked else now
        one.member = (
            one.member and question.kind != "fresh"
        )  # it got no state: whoever was to send it has died
        one.asked[rank] = question

    def at_the_end(self, replica: int, rank: int) -> None:
        """A rank has made all steps."""
        self._ending.setdefault(replica, set()).add(rank)

    def has_written(self) -> None:
        """One replica has written what the run leaves."""
        self.over = True

    # ---- what follows -----------------------------------------------------------------------

    def decide(self, now: float) -> list[Outgoing]:
        """Return what is to be said now."""
        return [*self._end(), *self._expel(now), *self._begin(now), *self._tell_of_waiting()]

    def _end(self) -> Iterator[Outgoing]:
        for number, one in enumerate(self.replicas) if self.closed else ():
            if not one.member:
                for rank in one.asked:
                    yield number, rank, {"is": "over"}
                one.asked = {}
        if self.over:
            for number, one in enumerate(self.replicas):
                for rank in [*one.asked, *self._ending.pop(number, ())]:
                    yield number, rank, {"is": "over"}
                one.asked = {}
        elif self._writer is None:
            leader = min(self._members, default=None)
            if leader is not None and len(self._ending.get(leader, ())) == self.ranks:
                self._writer = leader
                for rank in self._ending.pop(leader):
                    yield leader, rank, {"is": "write"}

    @property
    def _members(self) -> list[int]:
        return [number for number, one in enumerate(self.replicas) if one.member]

    def _ready(self, number: int) -> bool:
        return len(self.replicas[number].asked) == self.ranks

    def _expel(self, now: float) -> Iterator[Outgoing]:
        """Leave out members that hang while others wait for them."""
        members = self._members
        waiting = [self.replicas[number].since for number in members if self._ready(number)]
        if waiting and now - min(waiting) > self.answer_s:
            for number in [
                number for number in members if not self._ready(number) and number not in self._ending
            ]:
                yield from self._send_away(number)

    def _send_away(self, number: int) -> Iterator[Outgoing]:
        one = self.replicas[number]
        for rank in sorted(one.present):
            yield number, rank, {"is": "expelled"}
        one.leave()
        one.attempt += 1

    def _begin(self, now: float) -> Iterator[Outgoing]:
        """Begin an epoch where everybody who is there has asked."""
        members = [number for number in self._members if number not in self._ending]
        fresh = [n for n, one in enumerate(self.replicas) if not one.member and self._ready(n)]
        if members:
            if not all(self._ready(number) for number in members):
                return
            asked = {number: next(iter(self.replicas[number].asked.values())) for number in members}
            newest = max(question.step for question in asked.values())
            for number in list(members):
                if any(not _can_reach(q, newest) for q in self.replicas[number].asked.values()):
                    yield from self._send_away(number)
                    members.remove(number)
            questions = [q for number in members for q in self.replicas[number].asked.values()]
            if any(q.kind == "failed" and q.step == newest for q in questions):
                fresh = []  # within a step nobody can join
            step = newest
        else:
            lacking = [one for n, one in enumerate(self.replicas) if not one.ended and n not in fresh]
            if not fresh or self._ending:
                return
            if lacking and now - min(self.replicas[number].since for number in fresh) < self.start_s:
                return
            step = -1
        yield from self._announce(members, fresh, step)

    def _announce(self, members: list[int], fresh: list[int], step: int) -> Iterator[Outgoing]:
        self.epoch += 1
        everyone = sorted([*members, *fresh])
        donors = {number: members[at % len(members)] for at, number in enumerate(fresh)} if members else {}
        for number in everyone:
            for rank, question in sorted(self.replicas[number].asked.items()):
                yield (
                    number,
                    rank,
                    {
                        "is": "epoch",
                        "epoch": self.epoch,
                        "members": everyone,
                        "meet": self.replicas[everyone[0]].asked[rank].address,
                        "makes_step": question.kind != "fresh" and question.step < step,
                        "donor": donors.get(number),
                        "serves": [joiner for joiner, donor in donors.items() if donor == number],
                    },
                )
        for number in everyone:
            self.replicas[number].member, self.replicas[number].asked = True, {}

    def _tell_of_waiting(self) -> Iterator[Outgoing]:
        """Tell members once in an epoch that somebody waits to join; they ask after their step."""
        waits = any(not one.member and self._ready(number) for number, one in enumerate(self.replicas))
        if not waits or self._told == self.epoch or not self._members:
            return
        self._told = self.epoch
        for number in self._members:
            for rank in sorted(self.replicas[number].present):
                yield number, rank, {"is": "waiting", "epoch": self.epoch}


def _can_reach(question: Question, step: int) -> bool:
    """Return whether a member has the weights of that step, or what makes them."""
    return question.step == step or (question.step == step - 1 and question.has_result)
