"""Several users on one disk, and files left by killed processes."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch

from launcher.cluster.store import SyncedCopy
from launcher.cluster.sync_manifest import pack
from launcher.offload.nvme import NvmeTier
from launcher.scratch import Scratch
from tests.cluster.launching import environment, launching, wait_for, wait_until_gone

OTHER = 54321
"""Another user."""


@contextmanager
def another_user() -> Iterator[None]:
    os.seteuid(OTHER)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def disk() -> Iterator[Path]:
    """Return a world-writable directory, like /tmp."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o1777)
    yield path
    shutil.rmtree(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_two_users_on_one_nvme_path(disk: Path) -> None:
    before = os.umask(0o022)
    try:
        with another_user():
            first = NvmeTier(disk)
            first.reserve(1 << 16)
            first.write("a", torch.ones(100)).result()
        # A crashed job of the other user: its lock is free, nobody else may remove it.
        left = disk / f"launcher-offload-{os.uname().nodename}-rank0-crashed"
        with another_user():
            left.mkdir(0o700)
            (left / "lock").touch(0o600)
        third = left.with_name("launcher-offload-elsewhere-rank0-crashed")
        with another_user():
            third.mkdir(0o700)
        second = NvmeTier(disk)
        os.seteuid(OTHER + 1)
        try:
            NvmeTier(disk).close()
        finally:
            os.seteuid(0)
        second.reserve(1 << 16)
        second.write("a", torch.zeros(100)).result()
        assert {stat.S_IMODE(tier.file.parent.stat().st_mode) for tier in (first, second)} == {0o700}
        assert left.exists() and third.exists() and first.file.parent != second.file.parent
        second.close()
        with another_user():
            found = torch.zeros(100)
            first.read("a", found).result()
            assert found.sum() == 100
            first.close()
            NvmeTier(disk).close()  # removes what this user left
        assert not left.exists() and third.exists()
    finally:
        os.umask(before)


KILLED = """
import os, signal, sys
from pathlib import Path
from launcher.scratch import Scratch
made = Scratch(Path(sys.argv[1]), "launch-", "ranks")
(made.path / "sub").mkdir()
(made.path / "sub" / "0.beacon").write_bytes(bytes(5000))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_killed_processes_leave_goes_with_the_next_one_and_what_lives_stays(tmp_path: Path) -> None:
    living = Scratch(tmp_path, "launch-", "ranks")
    for _ in range(2):
        subprocess.run([sys.executable, "-c", KILLED, tmp_path], env=environment(), timeout=60, check=False)
    assert len(list(tmp_path.iterdir())) == 2  # the second has removed the first
    (tmp_path / "launch-notes").mkdir()
    (tmp_path / ".launch-unfinished").mkdir()
    again = Scratch(tmp_path, "launch-", "ranks")
    assert again.removed >= 5000 and living.path.is_dir()
    assert {path.name for path in tmp_path.iterdir()} == {
        *(living.path.name, again.path.name, "launch-notes", ".launch-unfinished")
    }
    os.utime(tmp_path / ".launch-unfinished", (0, time.time() - 7200))
    living.close()
    again.close()
    Scratch(tmp_path, "launch-", "ranks").close()
    assert [path.name for path in tmp_path.iterdir()] == ["launch-notes"]


def test_nobody_is_led_out_of_the_directory(tmp_path: Path) -> None:
    """A symlink with the expected name is not followed."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis").touch()
    (tmp_path / f"launch-{os.uname().nodename}-ranks-aaaa").symlink_to(tmp_path / "mine")
    Scratch(tmp_path, "launch-", "ranks").close()
    assert (tmp_path / "mine" / "thesis").exists()


def test_a_run_cleans_up_after_an_agent_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    (tmp_path / "script.py").write_text("import time\nopen('started', 'w').write('x')\ntime.sleep(99)\n")
    with launching("script.py", cwd=tmp_path) as process:
        wait_for(tmp_path / "started")
        family = psutil.Process(process.pid).children(recursive=True)
        for one in [psutil.Process(process.pid), *family]:  # the guard, too
            one.send_signal(signal.SIGKILL)
        assert wait_until_gone([one.pid for one in family], 20) == []
    assert len(list(temporary.glob("launch-*"))) == 1
    (tmp_path / "script.py").write_text("")
    with launching("script.py", cwd=tmp_path) as process:
        assert process.wait(timeout=60) == 0
    assert not list(temporary.glob("launch-*"))


def test_copies_that_an_agent_had_not_finished(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a").write_text("text")
    parcel = pack([], str(tmp_path / "source"), str(tmp_path / "source"))
    root, here = tmp_path / "there", os.getcwd()
    killed = os.fork()
    if killed == 0:
        store = SyncedCopy(parcel.manifest(), root)
        piece = next(iter(parcel.pieces(store.missing())))
        store.take(piece["digest"], piece["data"])
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(killed, 0)
    assert len(list(root.glob("arriving-*/*"))) == 2  # the lock, and half a content
    try:
        store = SyncedCopy(parcel.manifest(), root)
        for piece in parcel.pieces(store.missing()):
            store.take(piece["digest"], piece["data"])
        assert (store.build() / "tree" / "a").read_text() == "text"
    finally:
        os.chdir(here)
    assert {path.name for path in root.iterdir()} == {"contents", "copies"}
