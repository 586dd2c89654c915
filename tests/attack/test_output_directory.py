"""An output directory has one owner at a time: a second run is refused in one line, a dead owner is replaced."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from launcher import earlier_run, owner
from launcher.cluster.agent import Agent
from launcher.cluster.node_spec import NodeSpec
from launcher.errors import ConfigError
from launcher.owner import Owner, Ownership, check_free, is_held, take
from tests.cluster.launching import environment, launch

HOLD = "import sys; from pathlib import Path; from launcher.owner import take; take(Path(sys.argv[1]), '', print); print('has it', flush=True); sys.stdin.read()"  # noqa: E501

CONTEND = """
import sys, time
from pathlib import Path
from launcher.owner import take
kept = []
for line in sys.stdin:
    start, directory = line.split()
    while time.time() < float(start):
        pass
    try:
        kept.append(take(Path(directory), "", lambda _: None))
        print("has it", flush=True)
    except Exception as error:
        print(str(error).splitlines()[0], flush=True)
"""


def holder(directory: Path) -> subprocess.Popen[str]:
    """Start another process that owns the directory."""
    command = [sys.executable, "-c", HOLD, str(directory)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "has it\n"
    return process


def test_a_living_owner_is_respected_and_a_dead_one_followed(tmp_path: Path) -> None:
    process = holder(tmp_path)
    with pytest.raises(ConfigError, match=rf"another run is writing to .*: process {process.pid} on"):
        take(tmp_path, "", print)
    process.kill()
    process.wait()
    said: list[str] = []
    ownership = take(tmp_path, "", said.append)
    (line,) = said
    assert f"process {process.pid} has ended" in line and line.startswith("taking over")
    ownership.give_back()
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
        ("the machine was restarted", {"pid": parent, "boot": "before"}, 0, "was restarted"),
        ("another machine, which shows that it lives", {"host": "elsewhere"}, 60, None),
        ("another machine, silent", {"host": "elsewhere"}, 600, "elsewhere has not responded for 6"),
        ("a container on this machine", {"space": "pid:[1]"}, 60, None),
    ]  # fmt: skip
    for name, changes, age, gone in cases:
        with subtests.test(name):
            path = put(tmp_path, **changes)
            os.utime(path, (time.time() - age,) * 2)
            if gone is None:
                with pytest.raises(ConfigError, match="dead after 120 s without a heartbeat"):
                    check_free(tmp_path)
            else:
                assert gone in (check_free(tmp_path) or "")
    path = put(tmp_path, host="elsewhere")
    assert check_free(tmp_path, "theirs") is None, "a restart of the same run"
    path.write_text("{")
    with pytest.raises(ConfigError, match="an unknown host"):
        check_free(tmp_path)


def test_one_of_many_gets_it(tmp_path: Path) -> None:
    """Several processes find a dead owner at the same time, 100 times."""
    several = [
        subprocess.Popen(
            [sys.executable, "-c", CONTEND],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        for _ in range(6)
    ]
    try:
        for each in range(100):
            directory = tmp_path / str(each)
            directory.mkdir()
            put(directory, pid=2**22 - 1, started=1)
            start = time.time() + 0.005
            for process in several:
                assert process.stdin is not None
                process.stdin.write(f"{start} {directory}\n")
            said = sorted(process.stdout.readline()[:12] for process in several if process.stdout)
            assert said == ["another run "] * 5 + ["has it\n"], (each, said)
    finally:
        for process in several:
            process.communicate("")


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
    assert done.returncode == 2 and f"another run is writing to {out}: process {process.pid}" in done.stderr
    assert "Traceback" not in done.stderr and not (out / "logs").exists()


UNSEEN = """
import sys
from launcher.cli import shares
from launcher.cli.main import main
shares.check_free = lambda *_: None  # as where the other run takes the directory a moment later
sys.exit(main(sys.argv[1:]))
"""


def test_one_of_two_that_start_at_the_same_moment_touches_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    log = out / "logs" / "rank0.log"
    log.parent.mkdir(parents=True)
    log.write_text("theirs")
    process = holder(out)
    config = '{"train_micro_batch_size_per_gpu": 1}'
    command = ["--device", "cpu", "--num_gpus", "1", "--config", config, "pretrain", "--output-dir", str(out)]
    done = subprocess.run(
        [sys.executable, "-c", UNSEEN, *command],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    process.kill()
    process.wait()
    assert done.returncode == 2 and f"another run is writing to {out}: process {process.pid}" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(log.parent.iterdir()) == [log] and log.read_text() == "theirs"


def until(found: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not found():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_an_owner_looks_whose_the_lock_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "BEAT_S", 0.01)
    ownership = take(tmp_path, "mine", print)
    assert is_held(tmp_path, "mine") and not is_held(tmp_path, "theirs") and not is_held(tmp_path, "")
    lock = tmp_path / owner.FILE
    lock.unlink()
    until(lock.exists)
    put(tmp_path, host="elsewhere", run="mine")  # the run goes on there, after a restart
    time.sleep(0.1)
    ownership.check()
    put(tmp_path, host="elsewhere", pid=7)

    def lost() -> bool:
        try:
            ownership.check()
        except ConfigError as error:
            assert "process 7 on elsewhere" in str(error) and "another run has taken over" in str(error)
            return True
        return False

    until(lost)
    before = lock.stat().st_mtime_ns
    time.sleep(0.1)
    ownership.give_back()
    assert lock.stat().st_mtime_ns == before, "it is touched no more"


def test_an_agent_kills_ranks_that_write_to_anothers_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost(Ownership):
        def __init__(self) -> None:
            pass

        def check(self) -> None:
            raise ConfigError("another run has taken over")

    agent = object.__new__(Agent)
    did: list[str] = []
    agent._ownership, agent._ranks = Lost(), object()  # type: ignore[assignment]
    monkeypatch.setattr(agent, "_say", lambda kind, **more: did.append(f"{kind}: {more['what']}"))
    monkeypatch.setattr(agent, "_finish", lambda grace_s: did.append(f"killed after {grace_s} s"))
    agent._check_ownership()
    assert did == ["refused: another run has taken over", "killed after 0 s"]


def test_strange_locks_are_told(tmp_path: Path, subtests: pytest.Subtests) -> None:
    me = asdict(Owner.me("theirs"))
    unknown = "an unknown host"
    cases: list[tuple[str, Callable[[Path], object], str]] = [
        ("a pipe", os.mkfifo, "is a pipe or a device"),
        ("a directory", Path.mkdir, "is a directory"),
        ("endless", lambda path: path.symlink_to("/dev/zero"), "is a pipe or a device"),
        ("large", lambda path: path.write_bytes(bytes(1 << 17)), "131,072 bytes"),
        ("no text", lambda path: path.write_bytes(b"\xff\xfe"), "not UTF-8"),
        ("deep", lambda path: path.write_text("[" * 50_000), unknown),
        ("a list", lambda path: path.write_text("[1]"), unknown),
    ]
    wrong = {"pid": 10**30, "host": 3, "started": {}, "since": "never", "space": None, "run": 3}
    for key, value in (*wrong.items(), ("since", 1e300), ("pid", 0), ("pid", "x"), ("boot", [])):
        text = json.dumps({**me, key: value})
        cases.append((f"{key} is {value}", lambda path, text=text: path.write_text(text), unknown))  # type: ignore[misc]
    for number, (name, make, told) in enumerate(cases):
        with subtests.test(name):
            directory = tmp_path / str(number)
            directory.mkdir()
            make(directory / owner.FILE)
            with pytest.raises(ConfigError, match=told):
                take(directory, "", print)


def test_records_of_failures_are_of_one_run(tmp_path: Path) -> None:
    """Two runs of a script may share their log directory."""
    shares = [NodeSpec("script", "x.py", [], str(tmp_path), run=run) for run in ("a" * 32, "b" * 32)]
    assert shares[0].log(0) == shares[1].log(0) and shares[0].record(0) != shares[1].record(0)


def finished_run(directory: Path) -> Path:
    """Return the directory after a run, with foreign files and the remains of a killed save."""
    for tag in ("global_step1", "global_step2", ".old-global_step2"):
        (directory / "checkpoints" / tag).mkdir(parents=True)
        (directory / "checkpoints" / tag / "meta.json").write_text("{}")
    (directory / "checkpoints" / "latest").write_text("global_step2")
    (directory / "model").mkdir()
    for name in ("model/config.json", "model/model.safetensors", "summary.json", "metrics.jsonl"):
        (directory / name).write_text("{}")
    (directory / "notes.txt").write_text("mine")
    (directory / "model" / "net.py").write_text("mine")
    return directory


def asked(**flags: object) -> Namespace:
    return Namespace(**{"resume": None, "overwrite": False, "model": None, "tokenizer": None, **flags})


@pytest.fixture
def attempt(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set the attempt number as the launcher, Slurm or a manifest does."""
    names = ("LAUNCHER_ATTEMPT", "LAUNCHER_RUN", "SLURM_JOB_ID", "SLURM_RESTART_COUNT", "LAUNCHER_RUN_KEY")

    def told(**variables: str) -> None:
        for name in names:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    told()
    return told


def test_an_earlier_run_is_not_replaced_in_silence(
    tmp_path: Path, attempt: Callable[..., None], subtests: pytest.Subtests
) -> None:
    before = sorted(finished_run(tmp_path).rglob("*"))
    refused = [
        (asked(), "earlier run: checkpoints and model.*--resume.*--overwrite"),
        (asked(resume=str(tmp_path.parent / "other")), "earlier run: checkpoints and model"),
        (asked(overwrite=True, resume="latest"), "--overwrite would remove the checkpoint"),
        (asked(overwrite=True, resume=str(tmp_path)), "--overwrite would remove the checkpoint"),
        (asked(overwrite=True, model=str(tmp_path / "model")), "which the run reads"),
        (asked(overwrite=True, tokenizer=str(tmp_path / "model")), "which the run reads"),
    ]
    for flags, words in refused:
        with subtests.test(words), pytest.raises(ConfigError, match=f"(?s){words}"):
            earlier_run.check(flags, tmp_path)
    allowed = [
        asked(resume="latest"),
        asked(resume=str(tmp_path / "checkpoints" / "global_step1")),
        asked(overwrite=True, model=str(tmp_path / "m.json")),
        asked(overwrite=True, model="gpt2"),
    ]
    for flags in allowed:
        earlier_run.check(flags, tmp_path)
    # A restart whose first attempt had not come so far has no right to what others left.
    attempt(LAUNCHER_ATTEMPT="1", LAUNCHER_RUN="me")
    with pytest.raises(ConfigError, match="earlier run"):
        earlier_run.check(asked(), tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


def test_checkpoints_are_results_when_latest_is_lost(tmp_path: Path, attempt: Callable[..., None]) -> None:
    (finished_run(tmp_path) / "checkpoints" / "latest").unlink()
    with pytest.raises(ConfigError, match="earlier run: checkpoints and model"):
        earlier_run.check(asked(), tmp_path)


def test_a_first_save_that_was_killed_is_no_result(tmp_path: Path, attempt: Callable[..., None]) -> None:
    (tmp_path / "checkpoints" / ".tmp-global_step1").mkdir(parents=True)
    earlier_run.check(asked(), tmp_path)


def test_a_directory_called_model_alone_is_nobodys_result(
    tmp_path: Path, attempt: Callable[..., None]
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "net.py").touch()
    earlier_run.check(asked(), tmp_path)


def test_overwrite_removes_what_a_run_wrote_and_nothing_else(
    tmp_path: Path, attempt: Callable[..., None]
) -> None:
    earlier_run.take_over(asked(overwrite=True), finished_run(tmp_path))
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {".run", "notes.txt", "model/net.py", "model/config.json"}
    earlier_run.check(asked(), tmp_path)


@pytest.mark.parametrize(
    ("first", "again"),
    [
        ({"LAUNCHER_RUN": "me"}, {"LAUNCHER_RUN": "me", "LAUNCHER_ATTEMPT": "1"}),
        ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}),
        ({"LAUNCHER_RUN_KEY": "job"}, {"LAUNCHER_RUN_KEY": "job"}),
    ],
    ids=["launch", "slurm", "kubernetes"],
)
def test_a_restart_goes_on_from_what_this_run_has_saved(
    first: dict[str, str], again: dict[str, str], tmp_path: Path, attempt: Callable[..., None]
) -> None:
    attempt(**first)
    finished_run(tmp_path)
    rollback = asked(resume=str(tmp_path / "checkpoints" / "global_step1"))
    earlier_run.check(rollback, tmp_path)
    earlier_run.take_over(rollback, tmp_path)
    attempt(**again)
    earlier_run.check(asked(), tmp_path)
    assert not earlier_run.has_saved(tmp_path)  # it goes back to step 1 again: step 2 is not this run's
    earlier_run.take_over(asked(overwrite=True), tmp_path)
    assert (tmp_path / "checkpoints" / "latest").exists()
    latest = tmp_path / "checkpoints" / "latest"
    latest.unlink()
    latest.write_text("global_step2")
    assert earlier_run.has_saved(tmp_path)
    attempt(**{name: "another" if name in first else value for name, value in again.items()})
    assert not earlier_run.has_saved(tmp_path)
