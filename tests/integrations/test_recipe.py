"""The Trainer's recipe, as shown in docs/guides/trainer.md."""

from __future__ import annotations

import re
from pathlib import Path

from transformers import LlamaForCausalLM

from tests.cluster.launching import ROOT, launch

RECIPE = ROOT / "recipes" / "hf_trainer.py"


def test_the_guide_shows_the_recipe() -> None:
    page = (ROOT / "docs" / "guides" / "trainer.md").read_text()
    shown = re.search(r"hf_trainer\.py`:\n\n```python\n(.*?)```", page, re.DOTALL)
    assert shown is not None
    assert RECIPE.read_text().partition('"""\n\n')[2] == shown[1]


def test_the_recipe_trains_and_saves(tmp_path: Path) -> None:
    """Runs the guide's command with fewer steps."""
    (tmp_path / "hf_trainer.py").write_text(RECIPE.read_text().replace("max_steps=30", "max_steps=10"))
    config = str(ROOT / "ds_configs" / "hf_zero3.json")
    done = launch("--config", config, "--num_gpus", "2", "--device", "cpu", "hf_trainer.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    first, last = (float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", done.stdout))
    assert last < first < 6
    model = LlamaForCausalLM.from_pretrained(tmp_path / "runs" / "hf_trainer")
    assert model.config.num_hidden_layers == 4
