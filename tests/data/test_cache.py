"""A cache directory is built once, by one of many processes, and never seen incomplete."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.data import cache
from launcher.data.cache import CHECKSUMS, build_once, cache_key

BUILDER = textwrap.dedent(
    """
    import runpy, sys, time
    from pathlib import Path

    # By its file: the package would bring torch, and seconds, with it.
    build_once = runpy.run_path(sys.argv[1])["build_once"]
    final, log, wait = Path(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4])

    def build(directory):
        with open(log, "a") as file:
            file.write("built\\n")
        (directory / "part-1").write_text("one")
        print("half", flush=True)
        time.sleep(wait)
        (directory / "part-2").write_text("two")

    build_once(final, build)
    assert (final / "part-1").read_text() + (final / "part-2").read_text() == "onetwo"
    print("done", flush=True)
    """
)


def start(final: Path, log: Path, wait: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILDER, cache.__file__, str(final), str(log), str(wait)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_processes_that_come_together_build_once(tmp_path: Path) -> None:
    final, log = tmp_path / "cache" / "thing", tmp_path / "log"
    processes = [start(final, log, 0.3) for _ in range(3)]
    for process in processes:
        output, _ = process.communicate(timeout=30)
        assert process.returncode == 0 and output.endswith("done\n")
    assert log.read_text() == "built\n"


def test_a_killed_builder_leaves_nothing_that_is_taken_for_whole(tmp_path: Path) -> None:
    final, log = tmp_path / "cache" / "thing", tmp_path / "log"
    victim = start(final, log, 60)
    assert victim.stdout is not None and victim.stdout.readline() == "half\n"
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    victim.stdout.close()
    assert not final.exists()

    successor = start(final, log, 0)
    output, _ = successor.communicate(timeout=30)
    assert successor.returncode == 0 and output.endswith("done\n")
    assert [path.name for path in final.parent.iterdir() if ".tmp-" in path.name] == []


def test_an_error_in_the_build_leaves_nothing_and_the_next_call_builds(tmp_path: Path) -> None:
    final = tmp_path / "thing"

    def fail(directory: Path) -> None:
        (directory / "part").write_text("half")
        raise RuntimeError("no space")

    with pytest.raises(RuntimeError, match="no space"):
        build_once(final, fail)
    assert not final.exists()

    def succeed(directory: Path) -> None:
        (directory / "part").write_text("whole")

    assert (build_once(final, succeed) / "part").read_text() == "whole"


def test_without_file_locks_every_process_builds_and_one_result_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_lock(*_: object) -> None:
        raise OSError("function not implemented")

    monkeypatch.setattr("launcher.data.cache.fcntl.flock", no_lock)
    final = tmp_path / "thing"

    def build_while_another_finishes(directory: Path) -> None:
        (directory / "part").write_text("second")
        final.mkdir()
        (final / "part").write_text("first")

    build_once(final, build_while_another_finishes)
    assert (final / "part").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir() if ".tmp-" in path.name] == []


def test_keys_differ_where_parts_are_cut_elsewhere() -> None:
    assert cache_key("ab", "c") != cache_key("a", "bc")
    assert cache_key("ab", 1) == cache_key("ab", "1")


def test_what_is_not_as_it_was_built_is_told_and_built_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, subtests: pytest.Subtests
) -> None:
    def build(directory: Path) -> None:
        (directory / "below").mkdir()
        (directory / "below" / "part").write_text("whole")
        (directory / "empty").touch()

    def flip(directory: Path) -> None:
        (directory / "below" / "part").write_bytes(b"whomd")

    def exchange(directory: Path) -> None:
        file = directory / CHECKSUMS
        file.write_text(file.read_text().replace("part", "trap"))

    damages: list[tuple[str, Callable[[Path], object], str]] = [
        ("a bit", flip, "below/part is damaged"),
        ("the end", lambda path: (path / "below" / "part").write_text("who"), "below/part is damaged"),
        ("a file", lambda path: (path / "empty").unlink(), "empty is missing"),
        ("a pipe", lambda path: ((path / "empty").unlink(), os.mkfifo(path / "empty")), "empty is missing"),
        ("the checksums", lambda path: (path / CHECKSUMS).unlink(), "it has no checksums"),
        ("a name", exchange, "its checksums are damaged"),
        ("no text", lambda path: (path / CHECKSUMS).write_bytes(b"\xff"), "cannot be read"),
    ]
    final = build_once(tmp_path / "cache" / "thing", build)
    for name, damage, told in damages:
        with subtests.test(name):
            caplog.clear()
            damage(final)
            build_once(final, build)
            assert (final / "below" / "part").read_text() == "whole" and (final / "empty").exists()
            (line,) = [record.getMessage() for record in caplog.records]
            assert told in line and "rebuilding it" in line and str(final) in line
            assert build_once(final, build) == final and len(caplog.records) == 1
            assert {path.name for path in final.parent.iterdir()} == {"thing", ".thing.lock"}
