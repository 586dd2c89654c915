"""An output directory has one owner at a time: another run is refused in one line, a dead one is followed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from launcher import owner
from launcher.errors import ConfigError
from launcher.owner import Owner, check_free, take
from tests.cluster.launching import launch

HOLD = "import sys; from pathlib import Path; from launcher.owner import take; take(Path(sys.argv[1]), '', print); print('has it', flush=True); sys.stdin.read()"  # noqa: E501


def holder(directory: Path) -> subprocess.Popen[str]:
    """Another process, which has the directory."""
    command = [sys.executable, "-c", HOLD, str(directory)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "has it\n"
    return process


def test_a_living_owner_is_respected_and_a_dead_one_followed(tmp_path: Path) -> None:
    process = holder(tmp_path)
    with pytest.raises(ConfigError, match=rf"another run writes to .*: process {process.pid} on"):
        take(tmp_path, "", print)
    process.kill()
    process.wait()
    said: list[str] = []
    give_back = take(tmp_path, "", said.append)
    (line,) = said
    assert f"process {process.pid} has ended" in line and line.startswith("taking over")
    give_back()
    assert list(tmp_path.iterdir()) == []


def test_an_owner_that_ends_leaves_nothing(tmp_path: Path) -> None:
    process = holder(tmp_path)
    process.communicate("")
    assert list(tmp_path.iterdir()) == []


def put(directory: Path, **changes: object) -> Path:
    path = directory / owner.FILE
    path.write_text(json.dumps(asdict(replace(Owner.me("theirs"), **changes))))  # type: ignore[arg-type]
    return path


def test_who_counts_as_gone(tmp_path: Path, subtests: pytest.Subtests) -> None:
    parent = os.getppid()
    cases: list[tuple[str, dict[str, object], float, str | None]] = [
        ("its id belongs to another process now", {"pid": parent, "started": 1}, 0, f"process {parent} has ended"),
        ("the machine was started again", {"pid": parent, "boot": "before"}, 0, "was started again"),
        ("another machine, which shows that it lives", {"host": "elsewhere"}, 60, None),
        ("another machine, silent", {"host": "elsewhere"}, 600, "elsewhere was silent for 6"),
        ("a container on this machine", {"space": "pid:[1]"}, 60, None),
    ]  # fmt: skip
    for name, changes, age, gone in cases:
        with subtests.test(name):
            path = put(tmp_path, **changes)
            os.utime(path, (time.time() - age,) * 2)
            if gone is None:
                with pytest.raises(ConfigError, match="gone after 120 s of silence"):
                    check_free(tmp_path)
            else:
                assert gone in (check_free(tmp_path) or "")
    path = put(tmp_path, host="elsewhere")
    assert check_free(tmp_path, "theirs") is None, "a restart of the same run"
    path.write_text("{")
    with pytest.raises(ConfigError, match="an unknown host"):
        check_free(tmp_path)


def test_one_of_many_gets_it(tmp_path: Path) -> None:
    """Processes that find a dead owner at the same time."""
    put(tmp_path, pid=2**22 - 1, started=1)
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    several = [
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    end = time.monotonic() + 60
    while sum(process.poll() is None for process in several) > 1 and time.monotonic() < end:
        time.sleep(0.05)
    (left,) = [process for process in several if process.poll() is None]
    printed = {process.pid: process.communicate("") for process in several}
    assert [pid for pid, (out, _) in printed.items() if "has it" in out] == [left.pid]
    assert all(
        "another run writes" in err or "others take" in err
        for pid, (_, err) in printed.items()
        if pid != left.pid
    )


def test_a_second_launch_is_refused_before_it_writes_a_log(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    process = holder(out)
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({
        "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }))  # fmt: skip
    done = launch(
        "--device", "cpu", "--config", str(config), "pretrain", "--output-dir", str(out), cwd=tmp_path
    )
    process.kill()
    process.wait()
    assert done.returncode == 2 and f"another run writes to {out}: process {process.pid}" in done.stderr
    assert "Traceback" not in done.stderr and not (out / "logs").exists()
