"""An installed wheel finds configurations and recipes by name, and its README has no dead links."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hatch_build import for_an_index
from launcher.cli.recipes import find_config
from tests.cli.test_main import answer
from tests.pages.packages import ROOT


def test_an_example_by_its_bare_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_config("ds_configs/zero2.json")[0] == find_config("zero2.json")[0]
    path, said = find_config("zero2.json")
    assert Path(path).samefile(ROOT / "ds_configs" / "zero2.json") and said is not None and path in said
    for name in ("./zero2.json", "there/zero2.json", "zero2", "zero9.json", "eyJ9"):
        assert find_config(name) == (name, None)
    (tmp_path / "zero2.json").write_text("{}")  # an existing file takes precedence
    assert find_config("zero2.json") == ("zero2.json", None)


def test_commands_take_the_name_and_say_which_file_it_is(tmp_path: Path) -> None:
    code, _, shown, errors = answer("check", "zero2.json", cwd=tmp_path)
    assert code == 0 and "zero_optimization.stage" in shown
    assert "using the example" in errors and "ds_configs/zero2.json" in errors
    code, _, shown, _ = answer(
        "--config", "zero2.json", "--device", "cpu", "--dry_run", "pretrain", cwd=tmp_path
    )
    assert code == 0 and "using the example" in shown


def test_the_readme_of_an_index() -> None:
    text = "[a](docs/a.md#b) [docs/c.md](docs/c.md) ![p](docs/p.png) [x](https://x.org) [y](#y)"
    assert for_an_index(text, None) == "a (`docs/a.md`) docs/c.md  [x](https://x.org) [y](#y)"
    assert for_an_index(text, "https://h/f").startswith("[a](https://h/f/docs/a.md#b) ")
    assert "](docs/" not in for_an_index((ROOT / "README.md").read_text(), None)


@pytest.mark.full
def test_a_wheel(tmp_path: Path) -> None:
    """Build the wheel, install it next to its dependencies, and use it in an empty directory."""
    pytest.importorskip("hatchling", reason="pip install hatchling")
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
    ]
    subprocess.run([*build, str(tmp_path), str(ROOT)], check=True, timeout=120)
    (wheel,) = tmp_path.glob("zero_launcher-*.whl")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
    subprocess.run([*install, str(tmp_path / "site"), str(wheel)], check=True, timeout=120)
    (tmp_path / "empty").mkdir()

    def launch(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "launcher.cli.main", *arguments],
            cwd=tmp_path / "empty",
            env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    shared = tmp_path / "site" / "launcher" / "_share"
    assert str(shared / "ds_configs" / "zero2.json") in launch("check", "zero2.json")
    plan = launch("--config", "zero2.json", "--device", "cpu", "--num_gpus", "2", "--dry_run", "finetune",
                  "--model", "m", "--dataset", "d")  # fmt: skip
    assert str(shared / "recipes" / "finetune.py") in plan
    (information,) = (tmp_path / "site").glob("zero_launcher-*.dist-info/METADATA")
    metadata = information.read_text()
    assert "Name: zero-launcher" in metadata and "](docs/" not in metadata and "# launcher" in metadata
