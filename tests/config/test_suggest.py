import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.config.problems import distance, nearest

words = st.text("abc", max_size=6)


@pytest.mark.parametrize(
    ("one", "other", "edits"),
    [
        ("", "", 0),
        ("stage", "stage", 0),
        ("stage", "stge", 1),
        ("stage", "sttage", 1),
        ("stage", "stags", 1),
        ("stage", "satge", 1),
        ("", "abc", 3),
        ("kitten", "sitting", 3),
        ("ca", "abc", 3),
    ],
)
def test_distance(one: str, other: str, edits: int) -> None:
    assert distance(one, other) == edits


@given(words, words)
def test_distance_is_symmetric_and_zero_only_for_equals(one: str, other: str) -> None:
    assert distance(one, other) == distance(other, one)
    assert (distance(one, other) == 0) == (one == other)
    assert abs(len(one) - len(other)) <= distance(one, other) <= max(len(one), len(other))


def test_nearest() -> None:
    keys = ["stage", "sub_group_size", "overlap_comm"]
    assert nearest("stag", keys) == "stage"
    assert nearest("Overlap-Comm", keys) == "overlap_comm"
    assert nearest("subgroupsize", keys) == "sub_group_size"
    assert nearest("learning_rate", keys) is None
    assert nearest("stgae", keys, furthest=0) is None
    assert nearest("x", []) is None
    assert nearest("overlap_com", ["overlap_cost", "overlap_comm"]) == "overlap_comm"
    assert nearest("warmup_mix_lr", ["warmup_max_lr", "warmup_min_lr"]) == "warmup_min_lr"
    assert nearest("abxdef", ["xbxdef", "abxdex"]) == "abxdex"  # the same beginning wins
