"""A run that began here resumes in DeepSpeed, from the files of `launch export`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import launcher
from launcher.checkpoint.fp32 import get_fp32_state_dict_from_zero_checkpoint
from launcher.cli.main import main
from tests.parity_deepspeed.checkpoint_table import Table, difference
from tests.parity_deepspeed.conftest import run_deepspeed
from tests.parity_deepspeed.exports import CASES, CONVERTED
from tests.parity_deepspeed.saves import AFTER, BEFORE, arguments_of, config_of, model_of, steps
from tests.pool import RankContext, WorkerPool


def begin(ctx: RankContext, root: Path) -> list[list[float]]:
    """Run, save and continue every case; return the losses after the save."""
    told = []
    for number, case in enumerate(CASES):
        model = model_of(case)
        engine = launcher.initialize(
            model=model, config=config_of(case, ctx.world), **arguments_of(case, model)
        )[0]
        steps(engine, 0, BEFORE)
        engine.save_checkpoint(root / str(number), client_state={"case": number})
        told.append(steps(engine, BEFORE, AFTER))
        engine.destroy()
    return told


def export(root: Path, number: int, case: dict[str, Any], ranks: int) -> None:
    arguments = [str(root / str(number)), str(root / f"{number}-out"), "--format", case["format"]]
    if case["format"] == "deepspeed":
        arguments += ["--stage", str(case["theirs"]), "--ranks", str(ranks)]
    assert main(["export", *arguments]) == 0


def test_deepspeed_goes_on(pool: WorkerPool, tmp_path: Path) -> None:
    mine = pool.run(begin, 2, tmp_path)[0]
    for number, case in enumerate(CASES):
        export(tmp_path, number, case, 2)
    theirs = run_deepspeed("exports", str(tmp_path), 2, tmp_path)
    table = Table()
    for number, (case, got, want) in enumerate(zip(CASES, theirs, mine, strict=True)):
        assert got["client"] == number and got["steps"] == BEFORE
        assert got["losses"] == pytest.approx(want, rel=2e-4 if case.get("dtype") else 1e-6), case
        written = f"here at stage {case['stage']}, exported as {case['format']}"
        table.add(case, written, 2, f"DeepSpeed at stage {case['theirs']}", difference(got["losses"], want))
        if case["format"] == "deepspeed" and case["theirs"]:  # DeepSpeed's zero_to_fp32
            weights = torch.load(tmp_path / f"{number}-fp32.pt")
            ours = get_fp32_state_dict_from_zero_checkpoint(tmp_path / str(number))
            assert set(weights) == set(ours), case
            assert all(torch.equal(weights[name], value.float()) for name, value in ours.items()), case
    table.write("3")
    _conversions(tmp_path)


def _conversions(root: Path) -> None:
    """Assert that DeepSpeed's `ds_to_universal`, run on exported files, gives the same files as a universal export."""
    for number in CONVERTED:
        source, out = str(root / str(number)), str(root / f"{number}-u")
        assert main(["export", source, out, "--format", "universal"]) == 0
    run_deepspeed("conversions", str(root), 1, root)
    for number in CONVERTED:
        made = next((root / f"{number}-theirs").glob("*/zero"))
        own = next((root / f"{number}-u").glob("*/zero"))
        names = {path.relative_to(made) for path in made.glob("*/*.pt") if path.stem != "step"}
        assert {path.relative_to(own) for path in own.glob("*/*.pt") if path.stem != "step"} == names
        for name in names:
            got, want = (torch.load(place / name, weights_only=False) for place in (made, own))
            got = got["param"] if isinstance(got, dict) else got  # stage 3 has no dict around it
            assert torch.equal(got.flatten(), want["param"].flatten()), (number, name)
