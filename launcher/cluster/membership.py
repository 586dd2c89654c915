"""Central decision about which replicas of a run train together from one step to the next.

Replicas are independent except for the averaging of gradients, and any of them may die. The ranks of a
replica ask here before they first train, and again whenever an exchange with the other replicas has failed or
another replica waits to join. Once all ranks of all live replicas have asked, an epoch begins: it has
members, and an address where their ranks meet.

[Note: the step that one has made, and another has not]

In a step, replicas exchange gradients. Then each of them tells the others that it has the result, and applies
the step once all have told it so. A replica that applies a step therefore knows that every other member has
the result. A replica that dies between two of these messages leaves some members behind: they have the
result, but have not heard from it. In the next epoch they are told to apply the step as well. If no member
has applied it, all discard the result and repeat the exchange, with gradients that they still have, without
the dead replica.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]
Outgoing: TypeAlias = tuple[int, int, Message]
"""(replica, rank in it, message)."""


@dataclass
class Question:
    """The request of a rank.

    Args:
        step: the step of its weights.
        kind: "fresh": it has just started; "boundary": between two steps; "failed": within the step after
            `step`.
        has_result: whether it has the result of the step after `step`.
        address: where it listens, for the case that it is the first member.
    """

    step: int
    kind: str
    has_result: bool
    address: tuple[str, int]


@dataclass
class Replica:
    """The known state of one replica."""

    attempt: int = -1
    present: set[int] = field(default_factory=set)
    """Ranks that are connected."""
    asked: dict[int, Question] = field(default_factory=dict)
    member: bool = False
    ended: bool = False
    """It will not come back."""
    since: float = 0.0
    """When the first of its ranks asked."""

    def leave(self) -> None:
        self.present, self.asked, self.member = set(), {}, False


class Membership:
    """Makes the decisions. All times are seconds of one clock, and no method blocks.

    Args:
        replicas: number of replicas.
        ranks: number of ranks in each.
        start_s: how long a run without members waits for missing replicas, once one is ready.
        answer_s: how long members wait for a connected replica that does not ask, before they continue
            without it. It may be computing, so this must be longer than a step.

    Attributes:
        over: one replica has written the results of the run: all others end.
        closed: no further replica may join.
    """

    def __init__(self, replicas: int, ranks: int, start_s: float = 600.0, answer_s: float = 120.0) -> None:
        self.replicas = [Replica() for _ in range(replicas)]
        self.ranks, self.start_s, self.answer_s = ranks, start_s, answer_s
        self.epoch = 0
        self.over = self.closed = False
        self._told = 0
        self._ending: dict[int, set[int]] = {}
        self._writer: int | None = None

    # ---- events -----------------------------------------------------------------------------

    def connected(self, replica: int, rank: int, attempt: int) -> None:
        one = self.replicas[replica]
        if attempt > one.attempt:
            one.leave()
            one.attempt = attempt
        one.present.add(rank)

    def is_current(self, replica: int, attempt: int) -> bool:
        """Return whether messages of this attempt still count."""
        return attempt == self.replicas[replica].attempt

    def gone(self, replica: int, attempt: int) -> None:
        """Record that a rank is gone: its replica cannot continue."""
        if self.is_current(replica, attempt):
            self.replicas[replica].leave()
            self.replicas[replica].attempt += 1  # messages of its other ranks no longer count
            self._ending.pop(replica, None)
            if self._writer == replica:
                self._writer = None

    def ended(self, replica: int) -> None:
        """Record that the replica has ended and will not be restarted."""
        self.replicas[replica].leave()
        self.replicas[replica].ended = True

    def asked(self, replica: int, rank: int, question: Question, now: float) -> None:
        one = self.replicas[replica]
        one.since = one.since if one.asked else now
        one.member = (
            one.member and question.kind != "fresh"
        )  # fresh: it received no state, because the replica that was to send it has died
        one.asked[rank] = question

    def at_the_end(self, replica: int, rank: int) -> None:
        """Record that a rank has completed all steps."""
        self._ending.setdefault(replica, set()).add(rank)

    def has_written(self) -> None:
        """Record that one replica has written the results of the run."""
        self.over = True

    # ---- decisions --------------------------------------------------------------------------

    def decide(self, now: float) -> list[Outgoing]:
        """Return the messages to send now."""
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
        """Remove members that hang while others wait for them."""
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
        """Begin an epoch once all members have asked, or enough new replicas if there are no members."""
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
                fresh = []  # no replica can join within a step
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
        """Notify members, once per epoch, that a replica waits to join; they ask after their step."""
        waits = any(not one.member and self._ready(number) for number, one in enumerate(self.replicas))
        if not waits or self._told == self.epoch or not self._members:
            return
        self._told = self.epoch
        for number in self._members:
            for rank in sorted(self.replicas[number].present):
                yield number, rank, {"is": "waiting", "epoch": self.epoch}


def _can_reach(question: Question, step: int) -> bool:
    """Return whether a member has the weights of that step, or the result from which to compute them."""
    return question.step == step or (question.step == step - 1 and question.has_result)
