"""`launch shim`: `import deepspeed` is this engine without `launch`, and a message says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.cli import shim
from launcher.cli.main import main
from launcher.integrations.surface import DIRECTORY, SWITCH, TOLD
from tests.cluster.launching import environment

ROOT = DIRECTORY.parents[2]
PROBE = "import deepspeed; print(getattr(deepspeed, '__launcher__', False))"


def python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in environment().items() if name not in (TOLD, SWITCH)}
    return subprocess.run(
        [sys.executable, *arguments], env={**kept, **variables}, capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a stand-in for site-packages."""
    monkeypatch.setattr(shim.sysconfig, "get_path", lambda name: str(tmp_path))
    return tmp_path


def imported(packages: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program in an environment with these packages, including another `deepspeed`."""
    (packages / "deepspeed.py").write_text("")
    started = f"import site; site.addsitedir({str(packages)!r}); {PROBE}"
    return python("-c", started, PYTHONPATH=f"{packages}{os.pathsep}{ROOT}", **variables)


def test_an_installed_shim_comes_first_tells_and_goes_again(
    packages: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["shim"]) == 0 and "not installed" in capsys.readouterr().out
    assert main(["shim", "install"]) == 0 and str(packages) in capsys.readouterr().out
    first = imported(packages)
    assert first.stdout == "True\n" and "uses launcher's engine" in first.stderr
    assert imported(packages, RANK="1").stderr == ""  # every rank would say it
    assert imported(packages, **{SWITCH: "0"}).stdout == "False\n"
    assert main(["shim", "remove"]) == 0 and "not installed" in capsys.readouterr().out
    assert imported(packages).stdout == "False\n"
    assert main(["shim", "remove"]) == 0


def test_a_command_and_what_it_starts_have_the_shim(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shim", "path"]) == 0
    assert capsys.readouterr().out == f"{DIRECTORY}\n"
    child = f"import subprocess, sys; {PROBE}; sys.exit(subprocess.call([sys.executable, '-c', {PROBE!r}]))"
    done = python("-m", "launcher.cli.main", "shim", "run", "--", sys.executable, "-c", child)
    assert done.stdout == "True\nTrue\n" and done.stderr.count("uses launcher's engine") == 1


def test_launch_tells_it_once_itself_and_its_flag_wins_over_an_installed_shim(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROBE.replace("deepspeed;", "deepspeed\n").replace(" print", "print"))
    (tmp_path / shim.FILE).write_text(f"import sys; sys.path.insert(0, {str(DIRECTORY)!r})")
    for flag, said in (((), 1), (("--no_deepspeed_shim",), 0)):
        command = ["-m", "launcher.cli.main", "--device", "cpu", *flag, str(tmp_path / "train.py")]
        done = python(*command, PYTHONPATH=str(ROOT))
        assert (done.stdout + done.stderr).count("`import deepspeed`") == said, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["run"], "missing argument: the command to run"),
        (["run", "--", "no-such-program"], "cannot be started"),
        (["add"], "add"),
        (["path", "more"], "takes no arguments"),
    ],
)
def test_mistakes_are_told(argv: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shim", *argv]) == 2
    assert error in capsys.readouterr().err


def test_a_directory_that_cannot_be_written_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shim, "place", lambda: Path(os.devnull) / shim.FILE)
    assert main(["shim", "install"]) == 2
    assert "launch shim run" in capsys.readouterr().err
