"""Records, traces and plots of timelines."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from launcher.errors import LauncherError
from launcher.pipeline.schedules import schedule
from launcher.pipeline.timeline.picture import svg
from launcher.pipeline.timeline.recording import read, trace, write
from launcher.pipeline.timeline.simulate import MicrobatchCosts, Timeline, simulate

SVG = "{http://www.w3.org/2000/svg}"


def timeline_of(name: str, *costs: float) -> Timeline:
    made = schedule(name, 3, 4)
    return simulate(made, MicrobatchCosts.even(made.virtual_stages, *costs))


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    timeline = timeline_of("zbv", 0.25, 0.5, 0.125)
    write(tmp_path / "run.json", timeline)
    assert read(tmp_path / "run.json") == timeline
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["actions"].pop(0) == {
        "rank": 0, "kind": "F", "stage": 0, "microbatch": 0, "start": 0.0, "end": 0.25
    }  # fmt: skip
    assert MicrobatchCosts.measured(timeline) == MicrobatchCosts((0.25,) * 6, (0.5,) * 6, (0.125,) * 6)


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_measured_costs_predict_the_run_that_they_are_of(name: str) -> None:
    timeline = timeline_of(name, 0.25, 0.5, 0.125, 0.0625)
    costs = MicrobatchCosts.measured(timeline)
    assert costs.transfer == 0.0625
    assert simulate(schedule(name, 3, 4), costs).bubble == timeline.bubble


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "X"}, "X"),
        ({"kind": "SEND_F"}, "not a compute action"),
        ({"rank": -1}, "rank -1 is out of range for 3"),
        ({"stage": 6}, "stage 6 is out of range for 6"),
        ({"end": -2}, "ends at -2"),
        ({"start": "soon"}, "soon"),
    ],
)
def test_a_wrong_record_is_refused(tmp_path: Path, change: dict[str, object], words: str) -> None:
    path = tmp_path / "run.json"
    write(path, timeline_of("zbv", 1, 1, 1))
    record = json.loads(path.read_text())
    record["actions"][3] |= change
    path.write_text(json.dumps(record))
    with pytest.raises(LauncherError, match=f"not a recorded pipeline step.*{words}"):
        read(path)
    record["actions"] = [row for row in record["actions"] if row["rank"] == 0 and row["kind"] == "F"]
    path.write_text(json.dumps(record | {"actions": []}))
    with pytest.raises(LauncherError, match=r"no actions of ranks \[0, 1, 2\]"):
        read(path)
    path.write_text("{}")
    with pytest.raises(LauncherError, match="missing key 'stages'"):
        read(path)
    with pytest.raises(LauncherError, match="cannot read"):
        read(tmp_path / "none.json")


def test_a_trace_has_a_thread_for_each_rank() -> None:
    events = trace(timeline_of("1f1b", 1, 1, 1), timeline_of("1f1b", 2, 2, 2))["traceEvents"]
    boxes = [event for event in events if event["ph"] == "X"]
    assert len(boxes) == 2 * 3 * 4 * 2
    assert {(event["pid"], event["tid"]) for event in boxes} == {(p, r) for p in (0, 1) for r in (0, 1, 2)}
    assert boxes[0] == {
        "name": "F0.0", "cat": "F", "ph": "X", "pid": 0, "tid": 0, "ts": 0, "dur": 1e6
    }  # fmt: skip
    json.dumps(events)


def test_a_picture_has_a_box_for_every_action() -> None:
    """An action that takes twice as long is twice as wide, on one scale; the captions contain bubble and memory."""
    predicted, measured = timeline_of("zb-h1", 1, 1, 1), timeline_of("zb-h1", 2, 2, 2)
    root = ElementTree.fromstring(svg(predicted, "a < b", measured, unit="s"))
    boxes = [box for box in root.iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None]
    assert len(boxes) == 2 * 3 * 4 * 3
    widths = [float(box.attrib["width"]) for box in boxes]
    assert widths[-1] == pytest.approx(2 * widths[0], abs=0.02)
    right = max(float(box.attrib["x"]) + float(box.attrib["width"]) for box in boxes)
    assert right <= float(root.attrib["width"]) and min(float(box.attrib["x"]) for box in boxes) > 0
    texts = [text.text or "" for text in root.iter(f"{SVG}text")]
    assert {"a < b", "rank 2", "F forward", "I input grad", "W weight grad", "time (s)"} <= set(texts)
    captions = [text for text in texts if "bubble" in text]
    assert [caption.split(":")[0] for caption in captions] == ["predicted", "measured"]
    assert all("14.3%" in caption and caption.endswith("3 2 1") for caption in captions)
    assert len({box.attrib["fill"] for box in boxes}) == 3
    two_chunks = ElementTree.fromstring(svg(timeline_of("zbv", 1, 1, 1), "zbv"))
    fills = {
        box.attrib["fill"] for box in two_chunks.iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None
    }
    assert len(fills) == 6
