"""`--sync`: which files are sent, that nothing is sent twice, and that ranks run the copy."""

from __future__ import annotations

import base64
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from launcher.cli.launch_flags import launch_parser, split_argv
from launcher.cluster.store import KEEP_S, SyncedCopy
from launcher.cluster.sync_manifest import SyncManifest, pack
from launcher.errors import ConfigError
from tests.cluster.launching import launch
from tests.cluster.testbed import Hosts, thorough

TELLS = """
import os, sys, helper
from pathlib import Path
here = Path(__file__)
print(os.environ["RANK"], helper.VALUE, Path.cwd() == here.parent, here, Path("data.txt").exists(), flush=True)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Create a git work tree with a script, a module, and an ignored file."""
    root = tmp_path / "project"
    root.mkdir()
    (root / "script.py").write_text(TELLS)
    (root / "helper.py").write_text("VALUE = 'first'\n")
    (root / "big.bin").write_bytes(b"x" * 1000)
    (root / ".gitignore").write_text("*.bin\n")
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    return root


def deliver(package: SyncManifest, root: Path) -> tuple[SyncedCopy, list[str]]:
    """Do what a control stream does; return the sent data."""
    store = SyncedCopy(package.manifest(), root)
    missing = store.missing()
    for piece in package.pieces(missing):
        store.take(**piece)
    return store, missing


def names(package: SyncManifest) -> list[str]:
    return sorted(name.removeprefix("tree/") for name in package.entries)


def test_what_git_ignores_is_left_out(project: Path) -> None:
    (project / "inner").mkdir()
    subprocess.run(["git", "init", "-q", str(project / "inner")], check=True)
    (project / "inner" / "of_its_own.py").write_text("")
    (project / "gone.py").write_text("")
    subprocess.run(["git", "-C", str(project), "add", "gone.py", "helper.py"], check=True)
    (project / "gone.py").unlink()
    (project / "a b\n'ä").write_text("")
    found = pack([], str(project), str(project))
    assert names(found) == [".gitignore", "a b\n'ä", "helper.py", "inner/of_its_own.py", "script.py"]
    # What is named is shipped, ignored or not.
    assert "big.bin" in names(pack([str(project / "big.bin")], str(project), str(project)))


def test_all_is_shipped_where_there_is_no_git(tmp_path: Path) -> None:
    for name in ("a.py", "sub/b.py", "sub/__pycache__/b.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "link").symlink_to("sub")
    (tmp_path / "a.py").chmod(0o755)
    found = pack([str(tmp_path / "a.py")], None, "/")
    assert list(found.entries) == ["0/a.py"] and found.directory is None
    found = pack([str(tmp_path / "a.py")], str(tmp_path), str(tmp_path / "sub"))
    assert names(found) == ["a.py", "link", "sub/b.py"] and found.directory == "tree/sub"
    assert found.places == {str(tmp_path / "a.py"): "tree/a.py"} and found.entries["tree/a.py"].mode == 0o755
    assert found.entries["tree/link"].link == "sub"


def test_what_cannot_be_shipped_is_named(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"is not in .*project, so its copy would have no working directory"
    ):
        pack([], str(project), "/")
    with pytest.raises(ConfigError, match="nowhere is not a directory"):
        pack([], "nowhere", "/")
    os.mkfifo(project / "pipe.bin")
    with pytest.raises(ConfigError, match=r"pipe\.bin is not a regular file"):
        pack([str(project / "pipe.bin")], None, "/")
    monkeypatch.setattr("launcher.cluster.sync_manifest.MOST_BYTES", 100)
    with pytest.raises(
        ConfigError, match=r"3 files \(.*\) are too much to send: .*; the largest: .*script.py \(\d+ bytes"
    ):
        pack([], str(project), str(project))
    (project / ".gitignore").write_text("*")
    with pytest.raises(ConfigError, match="git ignores everything there"):
        pack([], str(project), str(project))
    shutil.rmtree(project / ".git" / "refs")
    with pytest.raises(
        ConfigError, match=r"cannot determine which files of .* git ignores: fatal: not a git repository"
    ):
        pack([], str(project), str(project))


def test_contents_are_sent_once_and_made_good(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    package = pack([], str(project), str(project))
    store, missing = deliver(package, tmp_path / "store")
    assert len(missing) == 3
    copy = store.build()
    assert (copy / "tree" / "helper.py").read_text() == "VALUE = 'first'\n" and Path.cwd() == copy / "tree"
    (copy / "tree" / "helper.py").write_text("VALUE = 'broken'\n")
    (copy / "tree" / "output").write_text("of a run")
    again, missing = deliver(package, tmp_path / "store")
    assert missing == [] and again.build() == copy
    assert (copy / "tree" / "helper.py").read_text() == "VALUE = 'first'\n"
    assert (copy / "tree" / "output").exists()
    (project / "helper.py").write_text("VALUE = 'second'\n")
    package = pack([], str(project), str(project))
    other, missing = deliver(package, tmp_path / "store")
    assert missing == [package.entries["tree/helper.py"].digest]
    assert other.build() != copy and (copy / "tree" / "helper.py").read_text() == "VALUE = 'first'\n"
    kept = tmp_path / "store" / "contents" / missing[0]
    kept.write_text("damaged")
    assert deliver(package, tmp_path / "store")[1] == missing and kept.read_text() == "VALUE = 'second'\n"


def test_what_changes_meanwhile_is_not_taken(project: Path, tmp_path: Path) -> None:
    package = pack([str(project / "helper.py")], None, "/")
    store = SyncedCopy(package.manifest(), tmp_path / "store")
    (digest,) = store.missing()
    store.take(digest, base64.b64encode(b"something else").decode())
    with pytest.raises(ValueError):
        store.take(digest, None)
    assert store.missing() == [digest] and list((tmp_path / "store" / "contents").iterdir()) == []


def test_old_copies_are_forgotten_but_not_used_ones(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    long_ago = time.time() - 2 * KEEP_S
    stores, copies, contents = [], [], []
    for text in ("1", "2", "3"):
        (project / "helper.py").write_text(text)
        package = pack([], str(project), str(project))
        stores.append(deliver(package, tmp_path / "store")[0])
        copies.append(stores[-1].build())
        contents.append(tmp_path / "store" / "contents" / package.entries["tree/helper.py"].digest)
        for path in (copies[-1], contents[-1]):
            os.utime(path, (long_ago, long_ago))
    os.close(stores[0]._in_use or 0)  # its agent has ended
    stores[2].build()
    assert [path.exists() for path in copies] == [False, True, True]
    assert [path.exists() for path in contents] == [False, False, True]


@pytest.mark.parametrize(
    "after", [["--sync", "script.py"], ["--sync=src", "pretrain"], ["--sync", "pretrain"]]
)
def test_what_follows_the_flag_is_a_directory_or_the_program(
    after: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("src", "pretrain"):
        (tmp_path / name).mkdir()
    assert split_argv(launch_parser(), after) == (after[:1], after[1:])
    assert split_argv(launch_parser(), ["--sync", "src", "a.py"]) == (["--sync", "src"], ["a.py"])


def test_ranks_run_the_copy(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAUNCHER_CACHE", str(tmp_path / "cache"))
    flags = (
        "--num_gpus",
        "2",
        "--device",
        "cpu",
        "--tee",
        "all",
        "--sync",
        ".",
        "script.py",
        "--output-dir",
        "../out",
    )
    done = launch(*flags, cwd=project)
    assert done.returncode == 0, done.stderr
    assert re.search(r"sync: 3 files, \d+ bytes; sent \d+ bytes to localhost\n", done.stdout)
    copy = rf"{tmp_path}/cache/sync/copies/\w+/tree/script.py"
    for rank in (0, 1):
        assert re.search(rf"{rank}: {rank} first True {copy} False\n", done.stdout)
    assert "sent nothing to localhost\n" in launch(*flags, cwd=project).stdout
    assert not (tmp_path / "project" / "runs").exists() and (tmp_path / "out" / "logs").is_dir()


@thorough
def test_two_hosts_without_the_directory(hosts: Hosts, project: Path) -> None:
    for node in ("node1", "node2"):
        hosts("hide", node, str(project))
    (project / "ds.json").write_text('{"train_batch_size": 2, "train_micro_batch_size_per_gpu": 1}')
    cache = {"LAUNCHER_CACHE": "/dev/shm/cache"}  # every machine has its own
    hostfile = hosts.hostfile(project.parent, slots=1)
    flags = ("--hostfile", hostfile, "--device", "cpu", "--tee", "all", "--config", "ds.json", "--sync", ".")
    end = hosts.launch(project, *flags, "script.py", "--output-dir", str(project.parent / "out"), env=cache)
    assert end.code == 0, end.errors
    assert re.search(r"sync: 4 files, \d+ bytes; sent \d+ bytes to node1, node2\n", end.out)
    for rank in (0, 1):
        assert re.search(rf"node{rank + 1}:{rank}: {rank} first True /dev/shm/cache/sync/copies/", end.out)
    (project / "helper.py").write_text("VALUE = 'second'\n")
    end = hosts.launch(project, *flags, "script.py", "--output-dir", str(project.parent / "out"), env=cache)
    assert "node2:1: 1 second True" in end.out and "sent 17 bytes to node1, node2\n" in end.out
    end = hosts.launch(project, *flags, "script.py", env={"LAUNCHER_CACHE": "/proc/none"})
    assert end.code == 2 and "2 of 2 hosts are not ready, and nothing was started" in end.errors
    assert "\n  node1  the files cannot be copied there: No such file or directory: /proc/none" in end.errors
