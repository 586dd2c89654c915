"""`launch` reports mistakes quickly: torch is not imported, and nothing is started or written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.cli.request import run_directory
from launcher.config.monitor import PACKAGES, is_installed
from tests.cluster.launching import environment, launch

CONFIG = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}
HEAVY = ("torch", "transformers", "numpy", "datasets")
PROBE = """
import json, sys, time
started = time.process_time()
from launcher.cli.main import main
code = main(json.loads(sys.argv[1]))
heavy = [name for name in json.loads(sys.argv[2]) if name in sys.modules]
print("PROBE", json.dumps([code, heavy, time.process_time() - started]))
"""


def answer(*argv: str, cwd: Path) -> tuple[int, float, str, str]:
    """Return exit code, CPU seconds, stdout and stderr of `launch`, after checking that nothing heavy was imported."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(argv), json.dumps(HEAVY)],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "PROBE" in done.stdout, done.stderr
    shown, _, probe = done.stdout.rpartition("PROBE")
    code, heavy, seconds = json.loads(probe)
    assert heavy == []
    return code, seconds, shown, done.stderr


def config(directory: Path, **changes: object) -> str:
    path = directory / "ds.json"
    path.write_text(json.dumps({**CONFIG, **changes}))
    return str(path)


def test_help_is_light_and_complete(tmp_path: Path) -> None:
    code, seconds, shown, _ = answer("--help", cwd=tmp_path)
    assert code == 0 and seconds < 2  # 0.1 s on an idle machine; the imports above are what is guarded
    for flag in ("--config", "--num_gpus", "--master_port", "--device", "--enable_each_rank_log"):
        assert flag in shown
    assert "finetune" in shown


def test_ranks_that_make_no_whole_tensor_parallel_groups_are_not_started(tmp_path: Path) -> None:
    path = config(tmp_path, tensor_parallel={"autotp_size": 2})
    flags = ["--config", path, "--device", "cpu", "--num_gpus", "3", "pretrain", "--output-dir", "out"]
    done = launch(*flags, cwd=tmp_path)
    assert done.returncode == 2
    assert "autotp_size 2 does not divide the number of ranks, 3" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_stage_that_nobody_says_is_refused_before_any_rank(tmp_path: Path) -> None:
    path = config(tmp_path, zero_optimization={"stage": "auto"})
    code, _, _, errors = answer("--config", path, "pretrain", "--output-dir", "out", cwd=tmp_path)
    assert code == 2 and 'zero_optimization.stage is "auto"' in errors and f"{path}:1:" in errors


def test_trackers_that_are_not_installed_are_named_together(tmp_path: Path) -> None:
    """Checked before any rank starts, since each rank would first import torch."""
    missing = [
        name for name in ("wandb", "comet", "mlflow", "trackio") if not is_installed(PACKAGES[name][0])
    ]
    assert len(missing) > 1
    path = config(tmp_path, **{name: {"enabled": True} for name in missing})
    code, _, _, errors = answer("--config", path, "pretrain", "--output-dir", "out", cwd=tmp_path)
    assert code == 2 and all(PACKAGES[name][1] in errors for name in missing)
    assert not (tmp_path / "out").exists()
    assert f"pip install {PACKAGES[missing[0]][1]}" in launch("check", path, cwd=tmp_path).stdout


def test_typo_in_the_configuration(tmp_path: Path) -> None:
    path = config(tmp_path, zero_optimization={"stagge": 2})
    code, seconds, _, errors = answer("--config", path, "pretrain", "--output-dir", "out", cwd=tmp_path)
    assert code == 2 and seconds < 2
    assert errors.startswith("error: ")
    assert "zero_optimization.stagge" in errors and "stage" in errors and "Traceback" not in errors
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["pretrain"], "--config is missing"),
        (["--config", "absent.json"], "absent.json"),
        (["--config", "{config}", "pretrian"], "did you mean `launch pretrain`?"),
        (["cheque"], "did you mean `launch check`?"),
        (["--config", "{config}", "pretrian"], "finetune"),
        (["--config", "{config}", "absent.py"], "file not found: absent.py"),
        (["--config", "{config}", "pretrain", "--max-step", "3"], "did you mean --max-steps?"),
        (["--config", "{config}", "pretrain", "--max-steps", "many"], "--max-steps"),
        (["--numgpus", "2"], "did you mean --num_gpus?"),
        (["--config", "{config}", "--hostfile", "absent", "pretrain"], "the hostfile absent does not exist"),
        (
            ["--config", "{config}", "--launcher", "mpich", "pretrain"],
            "--launcher mpich requires a list of hosts",
        ),
    ],
)
def test_mistakes(tmp_path: Path, argv: list[str], said: str) -> None:
    path = config(tmp_path)
    code, _, shown, errors = answer(*[token.format(config=path) for token in argv], cwd=tmp_path)
    assert code == 2 and said in errors and "Traceback" not in errors
    assert shown == "" and [entry.name for entry in tmp_path.iterdir()] == ["ds.json"]


@pytest.mark.parametrize("recipe", ["pretrain", "finetune"])
def test_help_of_a_recipe(tmp_path: Path, recipe: str) -> None:
    code, _, shown, _ = answer("--config", config(tmp_path), recipe, "--help", cwd=tmp_path)
    assert code == 0 and "--max-steps" in shown and recipe in shown


def test_help_of_a_script_is_the_scripts(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import os, sys\nprint(sys.argv[1:], 'RANK' in os.environ)\n")
    done = launch("--num_gpus", "2", "mine.py", "--help", cwd=tmp_path)
    assert done.stdout == "['--help'] False\n"


def test_configuration_is_checked_before_a_script_starts(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("open('started', 'w')\n")
    done = launch("--config", config(tmp_path, trian_batch_size=4), "mine.py", cwd=tmp_path)
    assert done.returncode == 2 and "trian_batch_size" in done.stderr
    assert not (tmp_path / "started").exists()


def test_runs_of_the_same_second_get_directories_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = {run_directory(None, "pretrain") for _ in range(4)}
    assert len(made) == 4 and all(path.is_dir() and path.parent == tmp_path / "runs" for path in made)
    assert run_directory("named", "x") == run_directory("named", "x") == tmp_path / "named"
