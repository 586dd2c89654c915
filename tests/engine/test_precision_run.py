"""A recipe whose float16 run cannot continue: its error, its checkpoint, and resuming in bfloat16."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.launching import launch
from tests.pool.reference import tiny_llama

TAG = "global_step2_loss_scale_exhausted"


def pretrain(
    directory: Path, name: str, content: dict[str, Any], *flags: str
) -> subprocess.CompletedProcess[str]:
    """Run four steps of a small model at stage 3: on two ranks, and on one after resuming."""
    config = {
        "train_batch_size": 4,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        **content,
    }
    (directory / f"{name}.json").write_text(json.dumps(config))
    return launch(
        *("--num_gpus", "1" if "--resume" in flags else "2", "--device", "cpu", "--config", f"{name}.json"),
        *("pretrain", "--model", "model.json", "--dataset", "prose.txt", "--seq-length", "32"),
        *("--max-steps", "4", "--output-dir", name, *flags),
        cwd=directory,
    )


@pytest.mark.full
@pytest.mark.key("fp16.min_loss_scale")
def test_an_exhausted_run_leaves_a_checkpoint_that_goes_on_in_bf16(tmp_path: Path) -> None:
    """With a learning rate that is too high: one good step, one overflow that halves the scale, one at the minimum
    scale.
    """
    (tmp_path / "model.json").write_text(json.dumps(tiny_llama(vocab=260, layers=1).config.to_dict()))
    (tmp_path / "prose.txt").write_text("".join(f"{n} is followed by {n + 1}.\n" for n in range(300)))
    fp16 = {"enabled": True, "initial_scale_power": 4, "min_loss_scale": 8, "hysteresis": 1}
    high = {"type": "AdamW", "params": {"lr": 5.0}}  # too high for fp16, and not for bf16
    failed = pretrain(tmp_path, "fp16", {"fp16": fp16, "optimizer": high})
    said = failed.stdout + failed.stderr
    assert failed.returncode != 0, said
    assert "minimum of 8" in said and "lm_head.weight (ranks 0, 1)" in said and "Traceback" not in said
    assert "train in bf16" in said and f"--resume fp16/checkpoints/{TAG}" in said.replace(f"{tmp_path}/", "")
    saved = tmp_path / "fp16" / "checkpoints"
    assert (saved / "latest").read_text().strip() == TAG
    meta = json.loads((saved / TAG / "meta.json").read_text())["meta"]
    assert meta["global_steps"] == 2 and meta["skipped_steps"] == 1 and meta["loss_scale"]["scale"] == 8
    assert meta["client_state"]["data"]["samples"] == 2 * 4  # the batch that failed is read again

    low = {"type": "AdamW", "params": {"lr": 1e-4}}
    resumed = pretrain(
        tmp_path, "bf16", {"bf16": {"enabled": True}, "optimizer": low}, "--resume", str(saved / TAG)
    )
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    steps = [
        json.loads(line)["step"] for line in (tmp_path / "bf16" / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps == [3, 4]
