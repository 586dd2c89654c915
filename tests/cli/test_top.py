"""`launch top`: the display of a run, from its files."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from launcher.cli.main import main
from launcher.cli.top import _Screen, short_stack
from launcher.cluster.run_status import RunStatus
from launcher.monitor.flight_recorder import StepCounters
from launcher.pipeline.schedules import schedule
from launcher.pipeline.timeline.recording import write
from launcher.pipeline.timeline.simulate import MicrobatchCosts, simulate
from launcher.top.run_screen import ORDERS, render
from launcher.top.run_view import find_status, read_run, sparkline


def counters(**more: float) -> StepCounters:
    times = {"forward": 3.0, "backward": 6.0, "backward_wait": 2.0, "step": 0.5, "checkpoint": 0.5}
    return StepCounters(**{"steps": 12, "samples": 96, "counted": 10, "total": 10.0, **times, **more})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the directory of a run of four ranks in two stages, with a slow last rank."""
    status = RunStatus()
    places = [f"stage {stage}, dp {dp}" for stage in range(2) for dp in range(2)]
    status.begin(str(tmp_path / "logs"), [("node1", 2), ("node2", 2)], places, restarts=1)
    for at in (0, 10, 20, 30):
        told = [
            {
                "rank": rank, "pid": 100 + rank, "doing": "all_gather of model.layers.0", "since_s": 0.1,
                "counters": list(asdict(counters(
                    steps=at, counted=at, total=at, forward=at * (0.5 if rank == 3 else 0.3),
                    backward=0.2 * at, backward_wait=0.1 * at, saved_step=10, saved_at=time.time() - 7,
                    memory=3 << 30, peak=4 << 30,
                )).values()),
            }
            for rank in range(4)
        ]  # fmt: skip
        status.take(told)
    status.tick()
    lines = [{"step": n, "loss": 5.0 - n / 10, "lr": 1e-4, "tokens_per_s": 12345.0} for n in range(1, 31)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3')
    return tmp_path


def screen(run: Path, width: int, **more: Any) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(render(read_run(find_status(str(run))), width, **more))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    return "\n".join(lines)


@pytest.mark.parametrize("width", [80, 160])
def test_a_screen_says_it_all(run: Path, width: int) -> None:
    text = screen(run, width)
    for part in ("running", "4 ranks", "1 restart", "step 30", "loss 2.0000", "12.3k tokens/s", "node2"):
        assert part in text, text
    assert "checkpoint of step 10, 7 s ago" in text and "3.00 GiB" in text
    assert "forward 1.67x" in text and "node2 rank 3 is slow" in text
    assert ("stage 1, dp 1" in text) == (width == 160)


def test_stages_of_a_pipeline_are_drawn(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = simulate(schedule("1f1b", 2, 4), MicrobatchCosts((1.0, 1.0), (1.0, 1.0), (1.0, 1.0), 0.0))
    write(run / "schedule.json", made)
    text = screen(run, 80)
    assert "1f1b, 4 microbatches: 20% idle" in text
    lanes = [line for line in text.splitlines() if line.startswith("stage ")]
    assert [lane[8:].rstrip()[0] for lane in lanes] == ["F", "·"]
    assert all(len(lane) == 80 and {*lane[8:]} == {*"FB·"} for lane in lanes)
    assert "and 3 more ranks" in screen(run, 80, height=14)  # the stages take lines of the ranks
    assert main(["top", str(run), "--html", "-"]) == 0
    assert "<h2>Pipeline</h2>" in (run / "report.html").read_text()
    whole = json.loads((run / "schedule.json").read_text())
    endless = [{**row, "end": float("inf")} for row in whole["actions"]]
    changes = ({"stages": 10**12}, {"chunks": 10**18}, {"stages": 0, "actions": []}, {"actions": endless})
    for damaged in ("{", *({**whole, **change} for change in changes)):
        (run / "schedule.json").write_text(json.dumps(damaged))
        assert "idle" not in screen(run, 80)
    (run / "schedule.json").write_text(json.dumps({**whole, "schedule": "\x1b[31mred"}))
    assert "\x1b" not in screen(run, 80) and "red, 4 microbatches" in screen(run, 80)


def test_memory_is_shown_against_an_estimate(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = run / "estimate.json"
    told = [{"rank": 0, "peak_bytes": 5 << 30}, {"rank": 2, "peak_bytes": 4 << 30}]  # of each stage
    file.write_text(json.dumps({"per_rank": told}))
    assert main(["top", str(run), "--once", "--estimate", str(file)]) == 0
    shown = [line for line in capsys.readouterr().out.splitlines() if "node" in line]
    assert ["4.00 of 5.00 GiB" in line for line in shown[:4]] == [True, True, False, False]
    assert ["4.00 of 4.00 GiB" in line for line in shown[:4]] == [False, False, True, True]
    assert main(["top", str(run), "--html", "-", "--estimate", str(file)]) == 0
    assert "4.00 GiB, 80% of 5.00 GiB estimated" in (run / "report.html").read_text()
    for rank, peak in (("1e400", "5"), ("0", "-5"), ("0", "true")):
        file.write_text(f'{{"per_rank": [{{"rank": {rank}, "peak_bytes": {peak}}}]}}')
        assert main(["top", str(run), "--estimate", str(file)]) == 2
        assert "is not an estimate" in capsys.readouterr().err


def test_utilisation_and_experts_are_told_where_they_are_known(run: Path) -> None:
    assert "MFU" not in screen(run, 80)
    more = {"step": 31, "loss": 2.0, "mfu": 0.4123, "expert_load": 1.84}
    with (run / "metrics.jsonl").open("a") as file:
        file.write("\n" + json.dumps(more) + "\n")
    assert "MFU 41.2%" in screen(run, 160) and "max expert load 1.8x uniform" in screen(run, 160)


def test_a_low_terminal_shows_some_ranks_and_says_so(run: Path) -> None:
    assert "and 3 more ranks, 1 of them slow" in screen(run, 80, height=12)
    first = {order: screen(run, 80, height=12, order=order) for order in ORDERS}
    assert " 3 node2" in first["t"] and " 0 node1" in first["r"]


def test_json_has_the_shares_of_each_rank(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", str(run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    rank = told["ranks"][3]
    assert rank["slow"]["phase"] == "forward" and rank["pid"] == 103
    shares = rank["shares"]
    assert shares["wait"] == pytest.approx(0.1) and sum(shares.values()) == pytest.approx(1.0)
    assert told["last_metrics"]["step"] == 30 and told["checkpoint"]["step"] == 10


def test_times_are_those_since_the_last_look(run: Path) -> None:
    seen: dict[int, Mapping[str, float]] = {}
    first = read_run(find_status(str(run)), None, seen)
    file = run / "logs" / "status.json"
    content = json.loads(file.read_text())
    for rank in content["ranks"]:
        rank["counters"] |= {"counted": 40.0, "total": 50.0}
    file.write_text(json.dumps(content))
    second = read_run(find_status(str(run)), first, seen)
    assert first.ranks[0].seconds == 1.0 and second.ranks[0].seconds == 2.0


def test_a_page_for_a_browser(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "config.json").write_text('{"a": "<script>"}')
    assert main(["top", str(run), "--html", "-"]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    page = (run / "report.html").read_text()
    assert (
        "forward 1.67x the other ranks" in page
        and "node2 rank 3 is slow" in page
        and "&lt;script&gt;" in page
    )
    for part in ("<script", "http"):  # one file, and no server
        assert part not in page
    assert page.count("<polyline") == 3 and "last checkpoint: step 10" in page
    assert main(["top", str(run), "--html", str(run / "report.html")]) == 2  # a file of somebody's


def test_a_run_whose_front_end_was_killed_is_silent(run: Path) -> None:
    file = run / "logs" / "status.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"written_at": time.time() - 60}))
    assert "silent for 0:01:00" in screen(run, 80)


def test_what_ranks_are_called_cannot_act_on_the_terminal(run: Path) -> None:
    file = run / "logs" / "status.json"
    file.write_text(file.read_text().replace("node1", "no\\u001b[2Jde"))
    assert "\x1b[2J" not in screen(run, 80)


HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "markup": lambda status: status["ranks"][0].update(host="[/foo]", place="[/x]"),
    "an empty message": lambda status: status["messages"].append({"at": 1.0, "text": ""}),
    "no calendar has it": lambda status: status["messages"].append({"at": 1e30, "text": "x"}),
    "no slowness": lambda status: status["ranks"][0].update(slow={"phase": "x"}),
    "slowness that acts": lambda status: status["ranks"][0].update(
        slow={"phase": "\x1b[31m", "ratio": 2, "steps": 3}
    ),
    "a large number": lambda status: status["ranks"][0]["counters"].update(memory=10**400),
    "infinity": lambda status: status["ranks"][0]["counters"].update(memory=float("inf")),
    "before all time": lambda status: status.update(started_at=-1e30),
    "a text for a number": lambda status: status["ranks"][0].update(since_s="x"),
}


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("how", ["--once", "--json", "--html"])
def test_a_damaged_status_is_shown_or_refused(
    run: Path, what: str, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run / "logs" / "status.json"
    status = json.loads(file.read_text())
    HOSTILE[what](status)
    file.write_text(json.dumps(status))
    flags = [how, str(run / "page.html")] if how == "--html" else [how]
    code = main(["top", str(run), *flags])
    said = capsys.readouterr()
    assert code in (0, 2) and "\x1b[31m" not in said.out
    assert code == 0 or "is not the status file of a run" in said.err


def test_damaged_metrics_are_left_out(run: Path) -> None:
    file = run / "metrics.jsonl"
    lines = [
        "[" * 100_000,
        '{"step": 31, "loss": ' + "9" * 400 + "}",
        '{"step": 32, "loss": 1e308}',
        "[1]",
        "{}",
    ]
    file.write_text("\n".join([*file.read_text().splitlines()[:30], *lines]))
    assert "loss 2.0000" in screen(run, 80) and "loss" in screen(run, 20)


def test_a_chosen_rank_is_seen_wherever_it_is(run: Path) -> None:
    view = _Screen(find_status(str(run)), read_run(find_status(str(run))))
    view.order = "t"  # rank 3 is the slowest, and comes first
    for key, chosen in (("j", 3), ("j", 0), ("k", 3), ("k", 3)):
        assert view._press(key) and view.chosen == chosen
    assert " 3 node2" in screen(run, 80, height=12, chosen=3) and " 0 node1" not in screen(
        run, 80, height=12, chosen=3
    )


def test_a_stack_begins_with_what_the_main_thread_does() -> None:
    """faulthandler writes the main thread last, with full paths; both are unsuitable for 80 columns."""
    written = """0 (node1)
Thread 0x00007f01 (most recent call first):
  File "/opt/env/lib/python3.11/site-packages/torch/utils/writer.py", line 7 in wait
Current thread 0x00007f02 (most recent call first):
  File "/home/someone/far/away/launcher/engine/core.py", line 74 in forward
  File "/home/someone/far/away/train.py", line 3 in <module>
"""
    assert short_stack(written).splitlines() == [
        "0 (node1)",
        "Current thread 0x00007f02 (most recent call first):",
        "  forward  engine/core.py:74",
        "  <module>  away/train.py:3",
        "Thread 0x00007f01 (most recent call first):",
        "  wait  torch/utils/writer.py:7",
    ]


def test_a_resumed_run_keeps_what_was_told_before(tmp_path: Path) -> None:
    for command, kept in (("launch pretrain", []), ("launch pretrain --resume", ["a rank was killed"])):
        first, second = RunStatus("launch pretrain"), RunStatus(command)
        first.begin(str(tmp_path), [("node1", 1)], [], restarts=0)
        first.end("failed", "a rank was killed")
        second.begin(str(tmp_path), [("node1", 1)], [], restarts=0)
        assert [text for _, text in second.messages] == kept


@pytest.mark.parametrize("flags", [(), ("--max_restarts", "0"), ("--max_restarts", "1")])
def test_a_host_that_cannot_be_left_is_told(
    tmp_path: Path, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "script.py").touch()
    assert main(["--on_straggler", "restart-without", *flags, str(tmp_path / "script.py")]) == 2
    assert "no host can be excluded" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"ranks": 3}', '{"ranks": [{}], "written_at": 0, "state": "running"}']
)
def test_what_is_no_status_is_refused(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "status.json").write_text(text)
    assert main(["top", str(tmp_path)]) == 2
    assert "is not the status file of a run" in capsys.readouterr().err


def test_no_run_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["top"]) == 2 and main(["top", "absent"]) == 2
    assert (
        "no run found in the current directory" in (said := capsys.readouterr().err)
        and "no status.json in" in said
    )


def test_a_curve_fits_its_width() -> None:
    assert sparkline([], 10) == "" and sparkline([1.0], 10) == "▁"
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert len(sparkline(list(range(1000)), 30)) == 30
