"""The progress line."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from launcher.monitor.progress import ProgressLine, duration, short_number


def record(step: int, **changes: Any) -> dict[str, Any]:
    values = {
        "loss": 2.34567,
        "grad_norm": 0.8125,
        "lr": 1.5e-4,
        "tokens_per_s": 12_345.0,
        "step_time_s": 2.0,
    }
    return {"step": step, "tokens": step * 100, **values, **changes}


def plain(steps: list[int], total: int = 20, **options: Any) -> list[str]:
    output = io.StringIO()
    with ProgressLine(total, console=Console(file=output), **options) as progress:
        for step in steps:
            progress.update(record(step))
    return output.getvalue().splitlines()


def test_a_line_says_everything_in_80_columns() -> None:
    (line,) = plain([8])
    assert line == "step 8/20  loss 2.3457  lr 0.00015  grad norm 0.812  12.3k tok/s  0:00:24 left"
    assert len(line) <= 80


def test_without_a_terminal_a_plain_line_every_so_many_steps_the_first_and_the_last() -> None:
    lines = plain(list(range(3, 21)), steps_per_print=8)
    assert [line.split()[1] for line in lines] == ["3/20", "8/20", "16/20", "20/20"]
    assert "left" not in lines[-1]


@pytest.mark.parametrize("never", [None, float("inf")])
def test_steps_per_print_may_be_never(never: float | None) -> None:
    assert [line.split()[1] for line in plain(list(range(1, 21)), steps_per_print=never)] == ["1/20", "20/20"]


def test_other_ranks_show_nothing() -> None:
    assert plain(list(range(1, 21)), enabled=False) == []


def test_missing_norm_and_eval_loss() -> None:
    line = ProgressLine(10).describe(record(1, grad_norm=None, eval_loss=1.5))
    assert "norm" not in line and "eval 1.5000" in line


def test_on_a_terminal_one_line_is_drawn_and_the_last_state_stays() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=100)
    with ProgressLine(20, console=console) as progress:
        for step in range(1, 21):
            progress.update(record(step))
        progress.message("saved")
    screen = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output.getvalue())
    assert "saved" in screen
    assert "step 20/20" in screen.strip().splitlines()[-1]


def test_numbers_and_durations_for_people() -> None:
    assert [short_number(x) for x in (7, 950, 12_345, 4_560_000, 7.89e9)] == [
        "7",
        "950",
        "12.3k",
        "4.56M",
        "7.89G",
    ]
    assert [duration(x) for x in (0.4, 61, 3_725)] == ["0:00:00", "0:01:01", "1:02:05"]
