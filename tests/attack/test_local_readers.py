"""DeepSpeed's checkpoint readers are not collectives: a single rank may call them, and so may all at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from launcher.checkpoint import fp32
from tests.engine.driving import advance, config_of, engine_of, whole_state
from tests.pool import RankContext, WorkerPool
from tests.zero.models import stack


def on_rank_0(ctx: RankContext, directory: Path, out: Path) -> dict[str, Tensor] | None:
    """Run on rank 0 alone: the other rank saves and exits."""
    engine = engine_of(config_of(3))
    advance(engine, ctx, range(1))
    engine.save_checkpoint(directory)
    state = whole_state(engine)
    if ctx.rank:
        return None
    got = fp32.get_fp32_state_dict_from_zero_checkpoint(directory)
    model = fp32.load_state_dict_from_zero_checkpoint(stack(seed=1), directory)
    fp32.convert_zero_checkpoint_to_fp32_state_dict(directory, out, safe_serialization=True)
    for name, value in model.named_parameters():
        assert torch.equal(value, got[name]) and torch.equal(value.flatten(), state[name].flatten())
    return got


def test_one_rank_alone_reads(pool: WorkerPool, tmp_path: Path) -> None:
    got, _ = pool.run(on_rank_0, 2, tmp_path / "saved", tmp_path / "out", timeout=60)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert got is not None and all(torch.equal(written[name], value) for name, value in got.items())


def convert(ctx: RankContext, directory: Path, out: Path, safe: bool, times: int) -> None:
    for _ in range(times):
        fp32.convert_zero_checkpoint_to_fp32_state_dict(
            directory, out, max_shard_size=2000, safe_serialization=safe
        )


@pytest.mark.parametrize("safe", [True, False])
def test_all_ranks_write_at_once(pool: WorkerPool, tmp_path: Path, safe: bool) -> None:
    saved, out = tmp_path / "saved", tmp_path / "out"
    out.mkdir()
    (out / ".model.safetensors.tmp").touch()  # not ours to judge
    pool.run(on_rank_0, 2, saved, tmp_path / "other")
    pool.run(convert, 4, saved, out, safe, 5)
    want = fp32.get_fp32_state_dict_from_zero_checkpoint(saved)
    got: dict[str, Tensor] = {}
    for path in out.glob("*.safetensors" if safe else "*.bin"):
        got |= load_file(path) if safe else torch.load(path)
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
    assert [path.name for path in out.iterdir() if path.name.startswith(".")] == [".model.safetensors.tmp"]
