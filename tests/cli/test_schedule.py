"""`launch schedule`: grid, bubble and memory without torch; plots, traces, and a run compared with its prediction."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.cli.schedule import schedule
from launcher.errors import ConfigError
from launcher.pipeline.schedules import schedule as make
from launcher.pipeline.timeline.recording import write
from launcher.pipeline.timeline.simulate import MicrobatchCosts, simulate
from tests.cli.test_main import answer

ONE = ("--stages", "2", "--microbatches", "2")


def told(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    assert schedule(argv) == 0
    return capsys.readouterr().out.splitlines()


def test_grid_bubble_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "1f1b", *ONE) == [
        "rank 0  F0 F1 .  .  B0--- .  B1---",
        "rank 1  .  F0 B0--- F1 B1---",
        "bubble, simulated: 33.3% of the time, 50.0% of the ideal time (total 9)",
        "bubble, closed form: 33.3% of the time, 50.0% of the ideal time",
        "activations held, by rank: 2 1 microbatches",
    ]
    assert told(capsys, "zbv", *ONE, "--costs", "2,2,2")[2].endswith(
        "(total 13)"
    )  # of the whole share of a rank
    uneven = told(capsys, "1f1b", *ONE, "--costs", "1,1,1/2,2,2", "--transfer", "0.5")
    assert uneven[2].endswith("(total 16)") and "not available for uneven costs" in uneven[3]
    assert "NOT equivalent" in told(capsys, "pipedream", *ONE)[-1]


def test_without_torch(tmp_path: Path) -> None:
    code, seconds, text, _ = answer("schedule", "zb-h1", *ONE, cwd=tmp_path)
    assert code == 0 and "rank 1" in text and seconds < 2
    assert answer("schedule", "zb-h2", *ONE, cwd=tmp_path)[0] == 2


def test_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run is plotted below the prediction from its own mean costs; flags stored in the run may be omitted."""
    made = make("1f1b", 2, 2)
    slow = {made.actions[1][0]: 1.0}
    write(tmp_path / "run.json", simulate(made, MicrobatchCosts.even(2, 1, 1, 1), slow))
    lines = told(capsys, "--trace", str(tmp_path / "run.json"), "--out", str(tmp_path / "run.svg"))
    assert lines[0] == f"written: {tmp_path / 'run.svg'}"
    assert lines[1].startswith("bubble, predicted:") and lines[2].startswith("bubble, measured: 35.0%")
    assert "measured: bubble 35.0%" in (tmp_path / "run.svg").read_text()
    told(capsys, "--trace", str(tmp_path / "run.json"), "--out", str(tmp_path / "both.json"))
    events = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    with pytest.raises(ConfigError, match="--stages is 3, but the run had 2"):
        schedule(["--trace", str(tmp_path / "run.json"), "--stages", "3"])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["1f1b", "--stages", "2"], "--microbatches is missing"),
        ([*ONE], "NAME is missing"),
        (["1f1b", *ONE, "--costs", "1,1"], "needs three numbers per row"),
        (["1f1b", *ONE, "--costs", "1,1,-1"], "'-1'"),
        (["1f1b", *ONE, "--costs", "1,1,1/1,1,1/1,1,1"], "3 rows for 2 virtual stages"),
        (["1f1b", *ONE, "--out", "a.png"], "FILE.svg or FILE.json"),
        (["1f1b", *ONE, "--out", "/nowhere/a.svg"], "cannot write"),
        (["1f1b", *ONE, "--microbatch", "3"], "--microbatches"),
    ],
)
def test_mistakes_say_what_to_write(argv: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        schedule(argv)
    assert words in str(error.value)
