"""Each script of examples/ works as shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cluster.launching import ROOT, launch

EXAMPLES = ROOT / "examples"


def said(name: str, directory: Path, ranks: int = 2) -> str:
    """Return the output of an example, run on CPU ranks that write to `directory`."""
    flags = ["--num_gpus", str(ranks), "--device", "cpu", str(EXAMPLES / name)]
    done = launch(*flags, cwd=directory)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"(?<!_)loss'?:? '?([\d.]+)", text)]


def test_the_page_lists_each_and_each_has_a_test() -> None:
    scripts = sorted(path.name for path in EXAMPLES.glob("*.py"))
    assert sorted(re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text())) == scripts
    here = Path(__file__).read_text()
    assert [name for name in scripts if f'said("{name}"' not in here] == []


def test_a_plain_loop(tmp_path: Path) -> None:
    first, *_, last = losses(said("plain_loop.py", tmp_path))
    assert last < first / 2


@pytest.mark.full
def test_zero_3_and_an_export(tmp_path: Path) -> None:
    text = said("zero3_and_export.py", tmp_path)
    assert len(losses(text)) == 1
    generated = re.search(r"generated \[(.*)\]", text)
    assert generated is not None and 4 < len(generated[1].split(",")) <= 12
    assert (tmp_path / "runs" / "zero3_and_export" / "config.json").is_file()


@pytest.mark.full
def test_a_pipeline_module(tmp_path: Path) -> None:
    first, *_, last = losses(said("pipeline_module.py", tmp_path))
    assert last < first / 2


@pytest.mark.full
def test_the_trainer(tmp_path: Path) -> None:
    first, last = losses(said("hf_trainer.py", tmp_path))
    assert last < first
    assert (tmp_path / "runs" / "hf_trainer" / "model.safetensors").is_file()


@pytest.mark.full
def test_resuming_on_another_number_of_ranks(tmp_path: Path) -> None:
    first = said("resume_elsewhere.py", tmp_path, ranks=2)
    second = said("resume_elsewhere.py", tmp_path, ranks=1)
    assert "starting anew" in first and "going on after step 8" in second
    assert losses(second)[-1] < losses(first)[-1]
