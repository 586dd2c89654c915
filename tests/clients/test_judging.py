"""The text of a table row: equal results, different results, and errors without details of a single run."""

import pytest

from tests.clients.client import Client, Outcome
from tests.clients.judging import judge, plain

CLIENT = Client("A", "b", "c")
GOOD = Outcome(losses=[[2.0, 1.0], [2.0, 1.0]])
CLOSED = "[/__w/pytorch/gloo/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5033. GLHF! \N{BEACH WITH UMBRELLA}"


def ended(error: str, outcome: Outcome = GOOD) -> Outcome:
    return Outcome(error, outcome.losses)


@pytest.mark.parametrize(
    ("ours", "theirs", "words", "good"),
    [
        (GOOD, GOOD, "2 losses as DeepSpeed's, every bit", True),
        (Outcome(losses=[[2.0], [2.00001]]), Outcome(losses=[[2.0], [2.0]]), "1 loss as DeepSpeed's, to 5e-06", True),
        (Outcome(losses=[[2.0], [2.1]]), Outcome(losses=[[2.0], [2.0]]), "differs: 1 loss, by 5e-02", False),
        (Outcome(losses=[[2.0], [2.0]]), GOOD, "differs: 1 loss, and 2 losses with DeepSpeed", False),
        (Outcome(losses=[[float("nan")]]), GOOD, "fails: losses are not finite", False),
        (ended("rank 0 (pid 7) failed: KeyError: x"), GOOD, "fails: KeyError: x", False),
        (GOOD, ended("ValueError: y"), "trains, 2 losses; DeepSpeed does not here: ValueError: y", True),
        (Outcome("E: x"), Outcome("E: x"), "fails on both: E: x", False),
        (Outcome("E: x"), Outcome("E: y"), "fails on both: E: x (DeepSpeed: E: y)", False),
        (ended("E: x"), ended("E: x"), "2 losses as DeepSpeed's, every bit; then both end: E: x", False),
    ],
)  # fmt: skip
def test_the_words_of_a_row(ours: Outcome, theirs: Outcome, words: str, good: bool) -> None:
    assert judge(CLIENT, ours, theirs) == (words, good)


def test_an_end_that_the_table_of_clients_explains_is_right_where_losses_are() -> None:
    client = Client("A", "b", "c", ends="it asks for a moon")
    assert judge(client, ended("E: x"), ended("E: y")) == (
        "2 losses as DeepSpeed's, every bit; then both end: it asks for a moon",
        True,
    )
    assert judge(client, ended("E: x"), ended("E: y", Outcome(losses=[[9.0, 1.0]] * 2)))[1] is False


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (f"rank 0 (pid 10865) failed: RuntimeError: {CLOSED}", "a rank waits for one that has ended"),
        ("rank 1 (pid 5) failed: OSError: no file /tmp/a/b.json", "OSError: no file b.json"),
        ("RuntimeError: [/__w/a/b.cc:5] no such size", "RuntimeError: no such size"),
        ("E: " + "word " * 100, "E: " + "word " * 31 + "..."),
    ],
)
def test_an_error_says_nothing_that_is_of_one_run_only(error: str, words: str) -> None:
    assert plain(error) == words
