"""Options of param groups follow the parameters, not the order of the groups."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.errors import CheckpointError
from launcher.optim.saved_groups import saved_groups, schedule_of

SAVED: dict[str, Any] = {
    "param_groups": [{"lr": 1.0, "name": "a"}, {"lr": 1.0, "name": "b"}, {"lr": 3.0, "name": "c"}],
    "names": [["x", "y"], ["z"], ["w"]],
}


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ([["x", "y"], ["z"], ["w"]], [0, 1, 2]),
        ([["w"], ["x", "y", "z"]], [2, 0]),  # fewer groups, in another order
        ([["x"], ["y"], ["z"], ["w"]], [0, 0, 1, 2]),
        ([["x"], [], ["w"]], [0, 1, 2]),  # of another pipeline stage
    ],
)
def test_options_follow_the_parameters(names: list[list[str]], found: list[int]) -> None:
    assert saved_groups(SAVED, names) == found


def test_other_groups_are_refused() -> None:
    with pytest.raises(
        CheckpointError, match=r"param group 0 were in param groups 1 and 2.*lr 1\.0 and 3\.0"
    ):
        saved_groups(SAVED, [["z", "w"], ["x", "y"]])
    with pytest.raises(CheckpointError, match="has 3 param groups, but this run has 2"):
        saved_groups(SAVED, [["x"], ["unknown"]])
    with pytest.raises(CheckpointError, match="has 3 param groups, but this run has 1"):
        saved_groups({"param_groups": SAVED["param_groups"]}, [["x"]])
    assert saved_groups({"param_groups": SAVED["param_groups"]}, [["w"], ["x"], ["z"]]) == [0, 1, 2]


def test_rates_of_a_schedule_follow_their_groups() -> None:
    state = {"last_epoch": 4, "base_lrs": [1.0, 2.0, 3.0], "_last_lr": [4.0, 5.0, 6.0], "gammas": [1, 2, 3]}
    changed = state | {"base_lrs": [3.0, 1.0], "_last_lr": [6.0, 4.0]}
    assert schedule_of(state, [2, 0], 3) == changed
    sequence = {"_milestones": [1, 2, 3], "_schedulers": [state, state]}
    assert schedule_of(sequence, [2, 0], 3) == sequence | {"_schedulers": [changed, changed]}
