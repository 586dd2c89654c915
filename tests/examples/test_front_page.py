"""The README and the guides are correct: their commands and programs are run unchanged."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.launching import ROOT, environment, launch

README = ROOT / "README.md"


def blocks(page: Path, heading: str, language: str = "") -> list[str]:
    """Return the fenced blocks of one language under a heading."""
    section = page.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


def commands(block: str) -> str:
    """Return the commands of a block: lines after `$ `, and their indented continuation lines."""
    typed, going_on = [], False
    for line in block.splitlines():
        going_on = line.startswith("$ ") or (going_on and line.startswith("  "))
        typed += [line.removeprefix("$ ")] if going_on else []
    return "\n".join(typed)


def run(script: str, directory: Path) -> str:
    """Return the output of a shell script in which `launch` is this tree's."""
    function = f'launch() {{ "{sys.executable}" -m launcher.cli.main "$@"; }}\nset -e\n'
    done = subprocess.run(
        ["bash", "-c", function + script],
        cwd=directory,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.full
def test_sixty_seconds_and_what_follows(tmp_path: Path) -> None:
    """Train, fine-tune the result, and generate from the export."""
    (first,) = blocks(README, "Sixty seconds")
    text = run(commands(first), tmp_path)
    assert "using the example" in text and "6,562,048 parameters" in text
    (second,) = blocks(README, "Fine-tune, export, generate")
    assert "after   Capital of France? -> Paris" in run(commands(second), tmp_path)
    (program,) = blocks(README, "Fine-tune, export, generate", "python")
    (tmp_path / "generate.py").write_text(program)
    assert "Capital of Italy? Rome<eos>" in run(f'"{sys.executable}" generate.py', tmp_path)


def test_the_quick_start_shows_the_same() -> None:
    page = ROOT / "docs" / "quickstart.md"
    for heading in ("Sixty seconds", "Fine-tune, export, generate"):
        shown, known = ([commands(block) for block in blocks(one, heading)] for one in (page, README))
        assert shown == known != []


@pytest.mark.full
def test_the_program_of_the_guide(tmp_path: Path) -> None:
    program = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs/guides/library.md").read_text(), re.MULTILINE | re.DOTALL
    )[0]
    (tmp_path / "train.py").write_text(program)
    done = launch("--num_gpus", "2", "--device", "cpu", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "model" / "model.safetensors").is_file() and (
        tmp_path / "checkpoints" / "latest"
    ).is_file()
