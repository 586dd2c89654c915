"""Membership of replicas, decided without processes."""

from __future__ import annotations

from launcher.cluster.membership import Membership, Message, Question

HERE = ("127.0.0.1", 1)


class Table:
    """A membership with ranks that request epochs, and the replies they got."""

    def __init__(self, replicas: int = 3, ranks: int = 2) -> None:
        self.membership, self.ranks, self.now = (
            Membership(replicas, ranks, start_s=60, answer_s=20),
            ranks,
            0.0,
        )
        self.told: dict[tuple[int, int], list[Message]] = {}
        self.attempts = [0] * replicas

    def tell(self) -> None:
        for replica, rank, message in self.membership.decide(self.now):
            self.told.setdefault((replica, rank), []).append(message)

    def ask(
        self, replica: int, step: int, kind: str, *, has_result: bool = False, ranks: int | None = None
    ) -> None:
        for rank in range(self.ranks if ranks is None else ranks):
            self.membership.connected(replica, rank, self.attempts[replica])
            self.told.pop((replica, rank), None)
            question = Question(step, kind, has_result, HERE)
            self.membership.asked(replica, rank, question, self.now)
        self.tell()

    def die(self, replica: int) -> None:
        self.membership.gone(replica, self.attempts[replica])
        self.attempts[replica] += 1
        self.tell()

    def epoch(self, replica: int) -> Message | None:
        """Return the reply to both ranks, if it is the same epoch for both."""
        first, *others = (self.told.get((replica, rank), []) for rank in range(self.ranks))
        assert all(other == first for other in others)
        return next((message for message in first if message["is"] == "epoch"), None)

    def begin(self) -> None:
        for replica in range(len(self.attempts)):
            self.ask(replica, -1, "fresh")
        assert all(self.epoch(replica) for replica in range(len(self.attempts)))
        self.told.clear()


def test_at_first_all_are_waited_for() -> None:
    table = Table()
    table.ask(0, -1, "fresh")
    table.ask(1, -1, "fresh")
    table.ask(2, -1, "fresh", ranks=1)
    assert table.epoch(0) is None
    table.ask(2, -1, "fresh")
    for replica in range(3):
        epoch = table.epoch(replica)
        assert epoch is not None and epoch["members"] == [0, 1, 2] and epoch["donor"] is None


def test_who_does_not_come_is_not_waited_for_for_ever() -> None:
    table = Table()
    table.ask(0, -1, "fresh")
    table.membership.ended(2)
    table.ask(1, -1, "fresh")
    epoch = table.epoch(0)
    assert epoch is not None and epoch["members"] == [0, 1]
    table = Table()
    table.ask(0, -1, "fresh")
    table.now = 61
    table.tell()
    epoch = table.epoch(0)
    assert epoch is not None and epoch["members"] == [0]


def test_members_go_on_without_one_that_dies() -> None:
    table = Table()
    table.begin()
    table.ask(0, 7, "failed")
    table.ask(2, 7, "failed")
    assert table.epoch(0) is None  # replica 1 may still ask
    table.die(1)
    epoch = table.epoch(0)
    assert epoch is not None and epoch["members"] == [0, 2] and not epoch["makes_step"]


def test_a_step_that_one_has_made_is_made_by_all() -> None:
    table = Table()
    table.begin()
    table.die(1)
    table.ask(0, 7, "failed", has_result=True)
    table.ask(2, 8, "failed")  # it has heard from all, and noticed the death in the next step
    first, second = table.epoch(0), table.epoch(2)
    assert first is not None and first["makes_step"] and second is not None and not second["makes_step"]


def test_a_result_that_nobody_has_used_is_forgotten() -> None:
    table = Table()
    table.begin()
    table.die(1)
    table.ask(0, 7, "failed", has_result=True)
    table.ask(2, 7, "failed")
    assert not any(epoch["makes_step"] for epoch in (table.epoch(0), table.epoch(2)) if epoch)


def test_joining_between_two_steps() -> None:
    table = Table()
    table.begin()
    table.die(1)
    table.ask(0, 7, "failed")
    table.ask(2, 7, "failed")
    table.told.clear()
    table.ask(1, -1, "fresh")
    assert table.told[0, 0] == table.told[2, 1] == [{"is": "waiting", "epoch": 2}]
    table.ask(0, 8, "boundary")
    table.ask(2, 8, "boundary")
    donor, joiner = table.epoch(0), table.epoch(1)
    assert donor is not None and donor["serves"] == [1] and donor["members"] == [0, 1, 2]
    assert joiner is not None and joiner["donor"] == 0 and not joiner["makes_step"]


def test_nobody_joins_within_a_step() -> None:
    table = Table()
    table.begin()
    table.die(1)
    table.ask(1, -1, "fresh")
    table.ask(0, 7, "failed")
    table.ask(2, 7, "failed")
    epoch = table.epoch(0)
    assert epoch is not None and epoch["members"] == [0, 2] and table.epoch(1) is None
    assert [message["is"] for message in table.told[0, 0]] == ["epoch", "waiting"]
    table.ask(0, 8, "boundary")
    table.ask(2, 8, "boundary")
    joined = table.epoch(1)
    assert joined is not None and joined["members"] == [0, 1, 2]


def test_a_joiner_whose_donor_dies_asks_again() -> None:
    table = Table()
    table.begin()
    table.die(1)
    table.ask(1, -1, "fresh")
    table.ask(0, 8, "boundary")
    table.ask(2, 8, "boundary")
    table.die(0)  # while it sends its state
    table.ask(1, -1, "fresh")
    table.ask(2, 8, "failed")
    epoch = table.epoch(2)
    assert epoch is not None and epoch["members"] == [2] and table.epoch(1) is None


def test_who_is_silent_is_sent_away() -> None:
    table = Table()
    table.begin()
    table.ask(0, 7, "failed")
    table.ask(2, 7, "failed")
    table.now = 21
    table.tell()
    epoch = table.epoch(0)
    assert table.told[1, 0] == [{"is": "expelled"}] and epoch is not None and epoch["members"] == [0, 2]
    assert not table.membership.is_current(1, 0)


def test_words_of_an_earlier_attempt_do_not_count() -> None:
    table = Table()
    table.begin()
    table.membership.gone(1, 0)
    assert not table.membership.is_current(1, 0)
    table.membership.connected(1, 0, 1)
    table.membership.gone(1, 0)  # the other rank of the first attempt
    assert table.membership.replicas[1].present == {0}


def test_one_replica_writes_what_the_run_leaves() -> None:
    table = Table()
    table.begin()
    for replica in (2, 0, 1):
        assert not table.told
        for rank in range(2):
            table.membership.at_the_end(replica, rank)
        if replica == 0:
            break
        table.tell()
    table.tell()
    assert set(table.told) == {(0, 0), (0, 1)} and table.told[0, 0] == [{"is": "write"}]
    table.die(0)  # it is killed while it writes
    for rank in range(2):
        table.membership.at_the_end(1, rank)
    table.tell()
    assert table.told[1, 0] == [{"is": "write"}]
    table.membership.has_written()
    table.tell()
    assert table.told[2, 0] == [{"is": "over"}]
    table.ask(0, -1, "fresh")
    assert table.told[0, 0] == [{"is": "over"}]


def test_all_begin_anew_where_nobody_is_left() -> None:
    table = Table()
    table.begin()
    for replica in range(3):
        table.die(replica)
    for replica in range(3):
        table.ask(replica, -1, "fresh")
    epoch = table.epoch(0)
    assert epoch is not None and epoch["donor"] is None and epoch["members"] == [0, 1, 2]


def test_nobody_joins_a_run_that_is_being_stopped() -> None:
    table = Table()
    table.begin()
    table.die(1)
    table.membership.closed = True
    table.ask(0, 7, "failed")
    table.ask(2, 7, "failed")
    table.ask(1, -1, "fresh")
    epoch = table.epoch(0)
    assert epoch is not None and epoch["members"] == [0, 2]
    assert table.told[1, 0] == [{"is": "over"}]
