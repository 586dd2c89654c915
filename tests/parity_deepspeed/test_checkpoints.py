"""A run that DeepSpeed began resumes here with DeepSpeed's losses, on the same and on other topologies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import launcher
from launcher.checkpoint.fp32 import get_fp32_state_dict_from_zero_checkpoint
from launcher.checkpoint.source import SourceCheckpoint
from tests.parity_deepspeed.checkpoint_table import Table, difference
from tests.parity_deepspeed.conftest import run_deepspeed
from tests.parity_deepspeed.saves import AFTER, BEFORE, CASES, arguments_of, config_of, model_of, steps
from tests.pool import RankContext, WorkerPool


def go_on(ctx: RankContext, root: Path, further: int) -> list[list[float]]:
    """Return the losses of every case after loading it, at a stage `further` above the one it was saved at."""
    told = []
    for number, case in enumerate(CASES):
        model = model_of(case, seed=7)  # its initial values do not matter
        config = config_of(case, ctx.world, (case["stage"] + further) % 4)
        engine = launcher.initialize(model=model, config=config, **arguments_of(case, model))[0]
        path, client = engine.load_checkpoint(root / str(number))
        assert path is not None and client == {"case": number}
        assert engine.global_steps == BEFORE
        told.append(steps(engine, BEFORE, AFTER))
        engine.destroy()
    return told


def check_moments(root: Path, number: int) -> None:
    want = torch.load(root / f"{number}-moments.pt")
    stored = SourceCheckpoint.open(root / str(number))
    for name, states in stored.whole_states(1 << 20):
        for kind in ("exp_avg", "exp_avg_sq"):
            if f"{kind}/{name}" in want:
                assert torch.equal(states[kind], want.pop(f"{kind}/{name}")), (CASES[number], kind, name)
    assert not want, CASES[number]


# Saving ranks -> (ranks, further stages) of two resumed runs: every case on the same topology or at least at the same
# stage, and on another one.
TOPOLOGIES = {1: [(1, 0), (2, 2)], 2: [(2, 0), (1, 1)], 4: [(2, 0), (2, 3)]}


@pytest.mark.parametrize("world", TOPOLOGIES)
def test_losses_go_on(pool: WorkerPool, tmp_path: Path, world: int) -> None:
    theirs = run_deepspeed("saves", str(tmp_path), world, tmp_path)
    for number, case in enumerate(CASES):
        if case["stage"]:
            want = torch.load(tmp_path / f"{number}.pt")
            got = get_fp32_state_dict_from_zero_checkpoint(tmp_path / str(number))
            assert set(got) == set(want), case
            assert all(torch.equal(got[name], value.float()) for name, value in want.items()), case
            if case["stage"] == 3:
                check_moments(tmp_path, number)
    table = Table()
    for ranks, further in TOPOLOGIES[world]:
        for mine in pool.run(go_on, ranks, tmp_path, further):
            for case, got, want in zip(CASES, mine, theirs, strict=True):
                bar = 2e-4 if case.get("dtype") else 1e-6
                assert got == pytest.approx(want, rel=bar), (case, ranks, further)
                ways = ", ".join(f"{r} at +{f}" for r, f in TOPOLOGIES[world])
                table.add(case, f"stage {case['stage']}", world, ways, difference(got, want))
    table.write(f"1-{world}")
