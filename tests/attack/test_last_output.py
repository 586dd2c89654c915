"""A rank's last output arrives completely, at any reader's speed. A full log disk is reported."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from launcher.cluster.console import ConsoleWriter
from launcher.cluster.failure import Failure, describe
from launcher.cluster.terminal import LONGEST, LineLog
from tests.cluster.launching import environment, launch, launching, started

SIZE = 20_000_000
PRINTS = """
import os, sys
line = b"0123456789abcde\\xff" * 4 + b"\\n"
data = line * (int(sys.argv[1]) // len(line)) + b"the end"
at = 0
while at < len(data):
    at += os.write(1, data[at:])
sys.exit(int(sys.argv[2]))
"""


def printed(size: int) -> bytes:
    line = b"0123456789abcde\xff" * 4 + b"\n"
    return line * (size // len(line)) + b"the end"


@pytest.mark.parametrize("code", [pytest.param(0, marks=pytest.mark.full), 7])
def test_20_megabytes_arrive_whole_though_the_reader_sleeps(tmp_path: Path, code: int) -> None:
    """The reader sleeps longer than any output timeout; no process's memory grows meanwhile."""
    (tmp_path / "script.py").write_text(PRINTS)
    command = [
        sys.executable,
        "-m",
        "launcher.cli.main",
        "-q",
        "--no_local_rank",
        "script.py",
        str(SIZE),
        str(code),
    ]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    try:
        deadline = time.monotonic() + 60
        while (
            not (logs := list(tmp_path.glob("runs/*/logs/rank0.log"))) or logs[0].stat().st_size < SIZE - 100
        ):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        early = sizes(process)
        time.sleep(4)  # the rank has ended, and nobody reads
        late = sizes(process)
        digest, count = hashlib.sha256(), 0
        while data := process.stdout.read1(1 << 16):
            digest.update(data)
            count += len(data)
            time.sleep(0.002)
        assert process.wait(timeout=60) == code
    finally:
        process.kill()
    wanted = printed(SIZE)
    assert (count, digest.digest()) == (len(wanted), hashlib.sha256(wanted).digest())
    assert max(late) < 200 << 20 and sum(late) - sum(early) < 20 << 20


def sizes(process: subprocess.Popen[bytes]) -> list[int]:
    """Return the memory of the launcher's processes."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    found = []
    for one in family:
        try:
            found.append(one.memory_info().rss)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.mark.full
def test_who_does_not_read_can_leave(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PRINTS)
    with launching("-q", "--no_local_rank", "script.py", str(SIZE), "0", cwd=tmp_path) as process:
        while not list(tmp_path.glob("runs/*/logs/rank0.log")):
            time.sleep(0.05)
        time.sleep(2)
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        assert process.wait(timeout=30) == 130
        assert time.monotonic() - began < 12


def test_a_reader_that_has_gone_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PRINTS)
    process = started(("-q", "--no_local_rank", "script.py", str(SIZE), "0"), tmp_path)
    assert process.stdout is not None
    process.stdout.buffer.read(1000)
    process.stdout.close()
    assert process.wait(timeout=60) == 128 + signal.SIGPIPE


def test_the_front_end_goes_on_while_the_screen_waits() -> None:
    read, write = os.pipe()
    screen, settled = ConsoleWriter({0: "0: ", 1: "1: "}, write), []
    began = time.monotonic()
    for rank in (0, 1):
        screen.show(rank, b"x" * 300_000 + b"\nrest", lambda rank=rank: settled.append(rank))  # type: ignore[misc]
    screen.finish()
    assert time.monotonic() - began < 1 and not screen.finished
    screen.flush()
    assert settled == []
    seen: list[bytes] = []

    def slowly() -> None:
        while data := os.read(read, 50_000):
            seen.append(data)

    reader = threading.Thread(target=slowly)
    reader.start()
    while not screen.finished:
        time.sleep(0.01)
    os.close(write)
    reader.join()
    os.close(read)
    screen.flush()
    assert settled == [0, 1]
    lines = b"".join(seen).splitlines()
    assert [len(line) for line in lines] == [300_003, 300_003, 7, 7] and lines[-1] == b"1: rest"


def test_a_line_without_an_end_is_not_kept_in_memory(tmp_path: Path) -> None:
    log, screen = LineLog(tmp_path / "log"), ConsoleWriter({0: "0: "}, os.open(os.devnull, os.O_WRONLY))
    for _ in range(64):
        log.write(b"x" * (1 << 16))
        screen.show(0, b"x" * (1 << 16))
        assert len(log._line) <= LONGEST and len(screen._rest[0]) <= LONGEST
    log.close()
    screen.finish()
    assert (tmp_path / "log").stat().st_size in range(64 << 16, (64 << 16) + 100)


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="only root can mount a small disk"
)
@pytest.mark.parametrize("program", ["script.py", "prints.sh"])
def test_a_full_disk_is_named_as_the_cause(tmp_path: Path, program: str) -> None:
    (tmp_path / "script.py").write_text("for _ in range(100_000): print('many words')\n")
    (tmp_path / "prints.sh").write_text("#!/bin/sh\nwhile echo many words 2>/dev/null; do :; done; exit 3\n")
    (tmp_path / "prints.sh").chmod(0o755)
    (tmp_path / "disk").mkdir()
    kind = "--no_python ./" if program.endswith("sh") else ""
    launcher = (
        f"{sys.executable} -m launcher.cli.main --enable_each_rank_log disk --no_local_rank {kind}{program}"
    )
    line = f"mount -t tmpfs -o size=128k none disk && exec {launcher}"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", line],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    if "mount" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode not in (0, 2) and f"the disk of {tmp_path}/disk is full" in done.stderr, (
        done.stderr
    )
    assert "free some space there" in done.stderr and "agent was lost" not in done.stderr


def test_a_terminals_log_may_end_before_its_output(tmp_path: Path) -> None:
    (tmp_path / "log").symlink_to("/dev/full")
    log = LineLog(tmp_path / "log")
    log.write(b"words\n" * 10)
    log.close()
    assert log.problem is not None and "space" in str(log.problem)


def test_a_run_with_room_has_no_word_of_it(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("raise SystemExit(3)\n")
    done = launch("script.py", cwd=tmp_path)
    assert done.returncode == 3 and "full" not in done.stderr
    assert "full" not in describe(Failure(0, 1, 3, None), log_was_shown=True)
