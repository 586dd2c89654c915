"""zero_to_fp32: full weights from a checkpoint, in one process and in fp32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import launcher
from launcher.checkpoint import fp32
from tests.engine.driving import config_of, whole_state
from tests.pipeline.running import config_of as stages_config_of
from tests.pipeline.running import engine_of as stages_engine_of
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE
from tests.pool.reference import batch, share, tiny_llama

FROZEN = "model.embed_tokens.weight"


def save(ctx: RankContext, directory: Path, stage: int) -> dict[str, Tensor]:
    """Train two steps in bf16 with a frozen embedding; return the fp32 master weights and the frozen weight."""
    model = tiny_llama(layers=2)
    model.get_parameter(FROZEN).requires_grad_(False)
    config = config_of(stage, bf16={"enabled": True})
    engine = launcher.initialize(model=model, config=config, device=DEVICE)[0]
    for step in range(2):
        for ids in share(batch(step), ctx.rank, ctx.world):
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
    engine.save_checkpoint(directory)
    state = whole_state(engine)
    names = dict(model.named_parameters())
    return {name: state[name].view(names[name].shape) for name in names}


@pytest.mark.parametrize("stage", [0, 3])
def test_masters_come_out_as_they_are_and_frozen_weights_widened(
    pool: WorkerPool, tmp_path: Path, stage: int
) -> None:
    want = pool.run(save, 2, tmp_path, stage)[0]
    got = fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert {value.dtype for value in got.values()} == {torch.float32}
    assert all(torch.equal(got[name], value.float()) for name, value in want.items())
    assert torch.equal(want[FROZEN], want[FROZEN].bfloat16().float())  # stored in 16 bits
    assert any(not torch.equal(value, value.bfloat16().float()) for value in got.values())

    model = fp32.load_state_dict_from_zero_checkpoint(tiny_llama(layers=2, seed=1), tmp_path)
    assert all(torch.equal(p, got[name]) for name, p in model.named_parameters())


def test_the_command_writes_what_can_be_read(pool: WorkerPool, tmp_path: Path) -> None:
    want = pool.run(save, 2, tmp_path / "saved", 3)[0]
    for kind, read in (("--safe_serialization", load_file), ("", lambda path: torch.load(path))):
        out = tmp_path / f"out{kind}"
        assert fp32.main([str(tmp_path / "saved"), str(out), *filter(None, [kind])]) == 0
        name = "model.safetensors" if kind else "pytorch_model.bin"
        written = read(out / name)
        assert all(torch.equal(written[key], value.float()) for key, value in want.items())


def save_tied(ctx: RankContext, directory: Path, stages: int) -> None:
    engine = stages_engine_of(stages_config_of(0, 1, {"stages": stages}), tiny_llama(tied=True, layers=2))
    engine.save_checkpoint(directory)


@pytest.mark.parametrize("stages", [1, 2])
def test_tied_weights_have_all_their_names(pool: WorkerPool, tmp_path: Path, stages: int) -> None:
    pool.run(save_tied, 2, tmp_path, stages)
    state = fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert state["lm_head.weight"] is state["model.embed_tokens.weight"]
    tiny_llama(tied=True, layers=2, seed=1).load_state_dict(state, strict=True)
    fp32.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "out", safe_serialization=True)
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
