"""A run without progress is ended, with a message."""

from __future__ import annotations

import re
from pathlib import Path
from unittest.mock import ANY

import pytest

from launcher.cluster.hang import RankState, describe, place
from launcher.monitor import flight_recorder
from launcher.monitor.flight_recorder import FlightRecord, StepCounters
from tests.cluster.launching import launch

STACK = """Thread 0x00007f1 (most recent call first):
  File "/usr/lib/python3/threading.py", line 359 in wait
  File "/x/feeder.py", line 7 in feed

Current thread 0x00007f2 (most recent call first):
  File "/venv/torch/distributed/c10d.py", line 12 in wait
  File "/src/launcher/comm/collectives.py", line 70 in wait
  File "/src/data.py", line 88 in next_batch
  File "/src/train.py", line 5 in main
"""
# Each rank begins three operations; rank 1 stays before the last, in a function of its own.
HANGING = """
import os, time
from launcher.monitor import flight_recorder
def next_batch():
    time.sleep(99)
show = flight_recorder.mine().show
for unit in range(3):
    if os.environ["RANK"] == "1" and unit == 2:
        next_batch()
    show(f"all_gather of layers.{unit}/forward", "ranks 0,1,2")
time.sleep(99)
"""


# The last layer sleeps in microbatch 2 of the second step.
PIPELINE = """
import time, launcher, torch
from torch import nn
from launcher.pipe import LayerSpec, PipelineModule
class Sleepy(nn.Linear):
    seen = 0
    def forward(self, x):
        self.seen += 1
        if self.seen == 7:
            time.sleep(99)
        return super().forward(x)
layers = [LayerSpec(kind, 4, 4) for kind in (nn.Linear, nn.Linear, nn.Linear, Sleepy)]
net = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss)
config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4, "pipeline": {"stages": 2},
          "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
engine, *_ = launcher.initialize(model=net, config=config)
data = ((torch.ones(1, 4), torch.ones(1, 4)) for _ in range(99))
for _ in range(5):
    engine.train_batch(data)
"""


def state(
    rank: int, number: int | None, text: str = "all_gather of layers.7/forward", among: str = "ranks 0,1,2,3"
) -> RankState:
    return RankState(rank, "w0" if rank < 2 else "w1", number, text, 30.0 + rank, STACK, among)


def test_beacon_is_read_as_it_was_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "0.beacon"
    assert flight_recorder.read(path) is None
    flight_recorder.prepare(path)
    assert flight_recorder.read(path) is None
    monkeypatch.setenv(flight_recorder.VARIABLE, str(path))
    mine = flight_recorder.mine()
    assert mine is not None
    mine.show("first")
    mine.show("ä" * 300)
    sign = flight_recorder.read(path)
    assert sign is not None and sign.number == 2 and sign.text.startswith("ää") and 0 <= sign.since_s < 10
    mine.show("third", "ranks 0,2")
    assert flight_recorder.read(path) == FlightRecord(1, "third", ANY, "ranks 0,2"), (
        "each set of ranks counts for itself"
    )


def test_counters_are_read_as_they_were_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "0.beacon"
    flight_recorder.prepare(path)
    monkeypatch.setenv(flight_recorder.VARIABLE, str(path))
    mine = flight_recorder.mine()
    assert mine is not None and flight_recorder.read_counters(path) is None
    mine.show("something")
    mine.count(StepCounters(steps=7, counted=6, forward=1.5))
    mine.saved(7)
    mine.count(StepCounters(steps=8, counted=7, forward=1.75))
    told = flight_recorder.read_counters(path)
    assert (
        told is not None and (told.steps, told.forward, told.saved_step) == (8, 1.75, 7) and told.saved_at > 0
    )
    half = bytearray(path.read_bytes())
    half[256] |= 1  # as while it is written
    path.write_bytes(half)
    assert flight_recorder.read_counters(path) is None


def test_place_is_outside_of_what_only_waits() -> None:
    assert place(STACK) == "data.py:88 in next_batch"
    assert place("") is None


def test_who_waits_and_who_never_came() -> None:
    states = [state(0, 812), state(1, 812), state(2, 811, "reduce_scatter of head/backward"), state(3, 812)]
    assert describe(states, "/logs").splitlines() == [
        "no rank has made progress for 30 s",
        "  ranks 0,1,3 wait in all_gather of layers.7/forward among ranks 0,1,2,3 (number 812)",
        "  rank 2 (w1) never entered it; its last operation was reduce_scatter of head/backward among ranks 0,1,2,3 "
        "(number 811), "
        "at data.py:88 in next_batch",
        "  all stacks: /logs/hang.txt",
    ]
    assert "rank 0 (w0) has not reported any operation yet, at" in describe(
        [state(0, None), state(1, 3)], "/logs"
    )


def test_numbers_of_other_groups_say_nothing() -> None:
    wait = "the wait for gradients of stage 0, microbatch 3"
    norm = "all_reduce of norm"
    states = [state(0, 40, wait, ""), state(1, 40, wait, ""), state(2, 7, norm, "ranks 2,3")]
    states += [state(3, 6, "send of stage1/send_b", "")]
    lines = describe(states, "/logs").splitlines()
    assert lines[1] == f"  ranks 0,1 wait in {wait} (number 40)"
    assert lines[2].startswith(f"  rank 2 (w1) was last in {norm} among ranks 2,3 (number 7), at data.py:88")
    assert lines[3].startswith("  rank 3 (w1) was last in send of stage1/send_b (number 6), at ")


def test_hung_rank_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(HANGING)
    done = launch("--num_gpus", "3", "--hang_timeout", "2", "script.py", "--output-dir", "out", cwd=tmp_path)
    assert done.returncode == 1
    assert "ranks 0,2 wait in all_gather of layers.2/forward among ranks 0,1,2 (number 3)" in done.stderr
    assert (
        "rank 1 (localhost) never entered it; its last operation was all_gather of layers.1/forward"
        in done.stderr
    )
    assert "at script.py:5 in next_batch" in done.stderr
    stacks = (tmp_path / "out/logs/hang.txt").read_text()
    assert stacks.count("==== rank ") == 3 and stacks.count("script.py") >= 3


@pytest.mark.full
def test_a_hung_pipeline_names_stages_and_microbatches(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PIPELINE)
    done = launch("--num_gpus", "2", "--hang_timeout", "3", "script.py", "--output-dir", "out", cwd=tmp_path)
    assert "rank 0 (localhost) is in the wait for gradients of stage 0, microbatch 2" in done.stderr, (
        done.stderr
    )
    assert re.search(r"at script\.py:\d+ in <module>", done.stderr)
    assert "rank 1 (localhost) was last in the wait for inputs of stage 1, microbatch 2" in done.stderr
    assert "at script.py:10 in forward" in done.stderr


def test_a_script_that_shows_nothing_is_not_watched(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import time; time.sleep(2.5)")
    assert launch("--hang_timeout", "1", "script.py", cwd=tmp_path).returncode == 0
