"""`--dry_run` prints what would be run, and starts nothing."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.launching import launch

TELLS = "import json, os, sys\nprint(json.dumps([os.environ['RANK'], os.environ['WORD'], sys.argv[1:]]))\n"


def shown(out: str) -> list[list[str]]:
    """Return the command of each rank."""
    return [shlex.split(line.split(": ", 1)[1]) for line in out.splitlines() if line.startswith("  rank ")]


def test_nothing_is_submitted_or_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "script.py").touch()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sbatch").write_text(f"#!/bin/sh\ntouch {tmp_path}/submitted\n")
    (tmp_path / "bin/sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    flags = ("--dry_run", "--submit", "-p gpu", "--num_nodes", "2", "--export", "API_KEY=sesame-open")
    done = launch(*flags, "script.py", "--output-dir", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"bin", "script.py"}
    for said in ("Nothing is submitted", "#SBATCH --nodes=2", "sbatch -p gpu", "--export API_KEY "):
        assert said in done.stdout
    assert "sesame" not in done.stdout


def test_it_prints_what_each_rank_runs(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TELLS)
    exports = ("--export", "WORD=a 'b' $c", "--export", "API_KEY=sesame-open")
    flags = ("--dry_run", "--num_gpus", "2", "--device", "cpu", *exports)
    done = launch(*flags, "script.py", "--text", "two words", cwd=tmp_path)
    assert done.returncode == 0 and "2 ranks" in done.stdout, done.stderr
    assert "sesame" not in done.stdout and "API_KEY=***" in done.stdout
    commands = shown(done.stdout)
    assert len(commands) == 2 and list(tmp_path.iterdir()) == [tmp_path / "script.py"]
    for rank, command in enumerate(commands):  # they can be run as they are
        ran = subprocess.run(["env", *command], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert json.loads(ran.stdout) == [
            str(rank),
            "a 'b' $c",
            [f"--local_rank={rank}", "--text", "two words"],
        ]


def test_every_kind_of_host(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("me@w0 slots=2\nw1 slots=1\n")
    (tmp_path / "ds.json").write_text("{}")
    recipe = ("--config", "ds.json", "--device", "cpu", "pretrain", "--max-steps", "3")
    done = launch("-H", "hosts", "--dry_run", *recipe, cwd=tmp_path)
    commands = shown(done.stdout)
    assert [[word for word in command if word.startswith("RANK=")] for command in commands] == [
        [f"RANK={rank}"] for rank in range(3)
    ]
    assert all("WORLD_SIZE=3" in command and "MASTER_ADDR=w0" in command for command in commands)
    assert all(
        command[-2:] == ["--max-steps", "3"] and command[-3].endswith("pretrain.py") for command in commands
    )
    assert done.stdout.count("ssh") >= 2 and "base64" not in done.stdout and "exec(" not in done.stdout
    place = ("--no_ssh", "--num_nodes", "2", "--node_rank", "1", "--master_addr", "127.0.0.1")
    done = launch(*place, "--dry_run", "--module", "--device", "cpu", "json.tool", "x", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert shown(done.stdout)[1][-6:] == [sys.executable, "-u", "-m", "json.tool", "--local_rank=0", "x"]
    assert not (tmp_path / "runs").exists()


def test_degrees_that_do_not_fit_are_told(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"tensor_parallel": {"autotp_size": 3}}')
    done = launch(
        "--dry_run", "--num_gpus", "2", "--device", "cpu", "--config", "ds.json", "pretrain", cwd=tmp_path
    )
    assert done.returncode == 2 and "3" in done.stderr
