"""A run whose model DeepSpeed split resumes here with DeepSpeed's losses, with the same, another or no split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import launcher
from launcher.checkpoint.fp32 import get_fp32_state_dict_from_zero_checkpoint
from launcher.integrations.experts import MoE
from tests.parity_deepspeed.checkpoint_table import Table, difference
from tests.parity_deepspeed.conftest import run_deepspeed
from tests.parity_deepspeed.split_saves import AFTER, BEFORE, arguments_of, build, cases_of, config_of, steps
from tests.pool import RankContext, WorkerPool


def go_on(ctx: RankContext, root: Path, kind: str, tp: int, further: int, layout: str) -> list[Any]:
    """Return the losses of every case after loading it, over `tp` ranks, at a stage `further` above.

    None: not tested.
    """
    told: list[Any] = []
    for number, case in cases_of(kind):
        where, stage = root / f"{number}{layout}", (case["stage"] + further) % 4
        if not where.exists() or ("pp" in case and (ctx.world == 1 or stage > 1)):
            told.append(None)
            continue
        model = build(case, launcher.pipe, MoE, seed=7, ranks=ctx.world)  # its initial values do not matter
        config = config_of(case, ctx.world, tp, stage)
        engine = launcher.initialize(model=model, config=config, **arguments_of(case, model))[0]
        path, _ = engine.load_checkpoint(where)
        assert path is not None and engine.global_steps == BEFORE
        told.append(steps(engine, case, tp, BEFORE, AFTER))
        engine.destroy()
    return told


# Saving ranks -> (ranks, tensor-parallel degree, further stages, layout) of the resumed runs.
TOPOLOGIES = {
    2: [(2, 2, 0, ""), (1, 1, 1, ""), (2, 1, 2, "-universal")],
    4: [(2, 1, 0, ""), (4, 2, 3, ""), (2, 1, 0, "-universal")],
}


@pytest.mark.parametrize(("world", "kind"), [(2, "tp"), (4, "tp"), (4, "pp"), (2, "ep"), (4, "ep")])
def test_losses_go_on(pool: WorkerPool, tmp_path: Path, world: int, kind: str) -> None:
    theirs = run_deepspeed("split_saves", [str(tmp_path), kind], world, tmp_path)
    for number, case in cases_of(kind):
        if (tmp_path / f"{number}-universal").exists():
            got = get_fp32_state_dict_from_zero_checkpoint(tmp_path / str(number))
            where = next((tmp_path / f"{number}-universal").glob("*/zero"))
            assert set(got) == {path.parent.name for path in where.glob("*/fp32.pt")}, case
            for name, value in got.items():
                want = torch.load(where / name / "fp32.pt", weights_only=False)
                assert torch.equal(value, want["param"]), (case, name)
    table = Table()
    for ranks, tp, further, layout in TOPOLOGIES[world]:
        for mine in pool.run(go_on, ranks, tmp_path, kind, tp, further, layout):
            for (_, case), got, want in zip(cases_of(kind), mine, theirs, strict=True):
                if got is None:
                    continue
                # 16-bit gradient sums differ; a PipelineModule's first loss after loading does not.
                bar = 1e-6 if not case.get("dtype") else 2e-4 if kind == "tp" else 5e-4
                first = 2e-4 if case.get("dtype") and kind != "pp" else 1e-6
                assert got[0] == pytest.approx(want[0], rel=first), (case, ranks, tp, further, layout)
                assert got == pytest.approx(want, rel=bar), (case, ranks, tp, further, layout)
                ways = (
                    "whole, split, on other ranks; the universal copy" if kind == "tp" else "on other ranks"
                )
                table.add(case, f"stage {case['stage']}", world, ways, difference(got, want))
    table.write(f"2-{kind}-{world}")
