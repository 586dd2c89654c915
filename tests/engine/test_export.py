"""Weights are exported as Hugging Face reads them, and loaded from there, each rank its own part."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import launcher
from launcher.engine.weights import model_with_source
from launcher.errors import CheckpointError, ConfigError, ShardedParameterError
from launcher.models.build import load_config
from tests.engine.driving import advance, config_of, counted_reads, engine_of, whole_weights
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE
from tests.pool.reference import batch, share, tiny_gpt2, tiny_llama
from tests.tensor.zoo import tiny_model
from tests.versions import writes_on_main_process_only
from tests.zero.models import stack

KINDS = {"llama": tiny_llama, "gpt2": tiny_gpt2}


def trained(ctx: RankContext, kind: str, tied: bool, stage: int, sections: dict[str, Any]) -> Any:
    """Return an engine after two steps, so that its weights differ from those of any file."""
    model = KINDS[kind](tied=tied)
    engine = launcher.initialize(model=model, config=config_of(stage, **sections), device=DEVICE)[0]
    for step in range(2):
        for ids in share(batch(step), ctx.rank, ctx.world):
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
    return engine


def export(ctx: RankContext, directory: Path, *how: Any) -> tuple[dict[str, Tensor], Tensor]:
    """Return the parameters and logits of the export; every rank finds the files when the call returns."""
    engine = trained(ctx, *how)
    engine.save_16bit_model(directory / "model")
    assert (directory / "model" / "config.json").exists() and (
        directory / "model" / "model.safetensors"
    ).exists()
    engine.eval()
    with torch.no_grad():
        return whole_weights(engine), engine(input_ids=batch(7)).logits


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("sections", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_from_pretrained_reads_it(
    pool: WorkerPool, tmp_path: Path, kind: str, tied: bool, stage: int, sections: dict[str, Any]
) -> None:
    """In the training dtype, with tied weights stored once."""
    weights, logits = pool.run(export, 2, tmp_path, kind, tied, stage, sections)[0]
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert loaded.dtype == (torch.bfloat16 if sections else torch.float32)
    assert loaded.config.tie_word_embeddings == tied
    found = dict(loaded.named_parameters())
    assert found.keys() == weights.keys() == load_file(tmp_path / "model" / "model.safetensors").keys()
    for name, value in weights.items():
        assert torch.equal(found[name], value), name
    with torch.no_grad():
        assert torch.equal(loaded.eval()(input_ids=batch(7)).logits, logits)


def consolidate(ctx: RankContext, stage: int, tied: bool) -> None:
    engine = trained(ctx, "gpt2", tied, stage, {})
    weights, state = whole_weights(engine), engine._zero3_consolidated_16bit_state_dict()
    assert (state is None) == (ctx.rank > 0)
    if state is not None:
        fresh = tiny_gpt2(tied=tied, seed=5)
        fresh.load_state_dict(state)  # strict: tied names and buffers are there too
        for name, value in weights.items():
            assert torch.equal(fresh.get_parameter(name), value), name
        assert (state["lm_head.weight"] is state["transformer.wte.weight"]) == tied
    advance_one_more(engine, ctx)


def advance_one_more(engine: Any, ctx: RankContext) -> None:
    (ids,) = share(batch(3), ctx.rank, ctx.world)
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_the_whole_state_dict_is_on_rank_0(pool: WorkerPool, stage: int, tied: bool) -> None:
    pool.run(consolidate, 2, stage, tied)


def save_as_scripts_do(ctx: RankContext, tied: bool, directory: Path) -> None:
    """Save on every rank; rank 0 has the weights, the others None."""
    engine = trained(ctx, "gpt2", tied, 3, {})
    weights, state = whole_weights(engine), engine._zero3_consolidated_16bit_state_dict()
    engine.module.save_pretrained(directory, is_main_process=ctx.rank == 0, state_dict=state)
    if ctx.rank == 0:
        with pytest.raises(ShardedParameterError, match="is sharded by ZeRO-3 and not gathered"):
            engine.module.save_pretrained(directory / "without")
        found = dict(AutoModelForCausalLM.from_pretrained(directory).named_parameters())
        assert all(torch.equal(found[name], value) for name, value in weights.items())


@writes_on_main_process_only
@pytest.mark.parametrize("tied", [False, True])
def test_every_rank_calls_save_pretrained(pool: WorkerPool, tied: bool, tmp_path: Path) -> None:
    pool.run(save_as_scripts_do, 2, tied, tmp_path)


def export_odd(ctx: RankContext, directory: Path) -> None:
    """Export a frozen block, a frozen integer table and a buffer: dtypes of every width."""
    model = stack(frozen=(1,))
    model.table = torch.nn.Parameter(torch.arange(5), requires_grad=False)
    model.register_buffer("mean", torch.arange(3, dtype=torch.float64))
    whole = {name: value.detach().clone() for name, value in model.state_dict().items()}
    engine = engine_of(config_of(3, bf16={"enabled": True}), model)
    engine.save_16bit_model(directory / "all")
    engine.save_16bit_model(directory / "trained", exclude_frozen_parameters=True)
    stored = load_file(directory / "all" / "model.safetensors")
    assert stored.keys() == whole.keys()
    for name, value in whole.items():
        assert torch.equal(stored[name], value.bfloat16() if value.dtype == torch.float32 else value), name
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert load_file(directory / "trained" / "model.safetensors").keys() == whole.keys() - frozen
    with pytest.raises(ConfigError, match=r"other\.safetensors"):
        engine.save_16bit_model(directory, "other.safetensors")
    engine.save_16bit_model(directory / "pickled", "pytorch_model.bin")
    pickled = torch.load(directory / "pickled" / "pytorch_model.bin")
    assert pickled.keys() == whole.keys() and os.listdir(directory / "pickled") == ["pytorch_model.bin"]
    assert all(torch.equal(pickled[name], value) for name, value in stored.items())
    engine.save_checkpoint(directory / "state", exclude_frozen_parameters=True)
    with pytest.raises(CheckpointError, match=r"lacks \d frozen parameters") as told:
        engine.load_checkpoint(directory / "state")
    assert "pass exclude_frozen_parameters=True" in str(told.value)
    assert engine.load_checkpoint(directory / "state", exclude_frozen_parameters=True)[0] is not None
    engine.save_16bit_model(directory / "again")
    again = load_file(directory / "again" / "model.safetensors")
    assert all(torch.equal(again[name], value) for name, value in stored.items())


def test_parameters_of_every_dtype_and_only_those_trained(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(export_odd, 2, tmp_path)


def export_nowhere(ctx: RankContext, directory: Path) -> str:
    engine = engine_of(config_of(3))
    (directory / "file").touch()
    try:
        engine.save_16bit_model(directory / "file" / "model")
    except CheckpointError as error:
        advance(engine, ctx, [0])
        return str(error)
    return ""


def test_a_failure_to_write_is_told_on_every_rank(pool: WorkerPool, tmp_path: Path) -> None:
    assert all("could not be written" in message for message in pool.run(export_nowhere, 2, tmp_path))


# ---- and in -------------------------------------------------------------------------------------


def start_from(ctx: RankContext, directory: Path, stage: int, sections: dict[str, Any]) -> tuple[Any, int]:
    """Return the weights after initialize(), and the elements that this rank read."""
    made = model_with_source(load_config(str(directory)), str(directory), from_scratch=False, seed=0)
    assert all(p.is_meta for p in made.model.parameters())
    with counted_reads() as read:
        engine = launcher.initialize(
            model=made.model, config=config_of(stage, **sections), source=made.source, device=DEVICE
        )[0]
    weights = whole_weights(engine)
    engine.eval()
    with torch.no_grad():
        logits = engine(input_ids=batch(7)).logits
    return (weights, logits), sum(read)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
def test_each_rank_reads_what_it_keeps(
    pool: WorkerPool, tmp_path: Path, kind: str, tied: bool, stage: int
) -> None:
    model = KINDS[kind](tied=tied, seed=3)
    model.save_pretrained(tmp_path)
    total = sum(p.numel() for p in model.parameters())
    ranks = pool.run(start_from, 2, tmp_path, stage, {})
    with torch.no_grad():
        want = model.eval()(input_ids=batch(7)).logits
    for (weights, logits), _ in ranks:
        for name, p in model.named_parameters():
            assert torch.equal(weights[name], p), name
        assert torch.equal(logits, want)
    reads = [read for _, read in ranks]
    if stage == 0:
        assert reads == [total, total]
    else:
        assert sum(reads) == total
        assert max(reads) < 0.6 * total


def buffer_of(ctx: RankContext, directory: Path, name: str) -> Tensor:
    made = model_with_source(load_config(str(directory)), str(directory), from_scratch=False, seed=0)
    engine = launcher.initialize(model=made.model, config=config_of(3), source=made.source, device=DEVICE)[0]
    return dict(engine.module.named_buffers())[name].clone()


@pytest.mark.parametrize(
    ("kind", "suffix"), [("deepseek_v3", "e_score_correction_bias"), ("apertus", "act_fn.beta")]
)
def test_buffers_are_read_as_well(pool: WorkerPool, tmp_path: Path, kind: str, suffix: str) -> None:
    """DeepSeek-V3 chooses experts by a bias, which is a buffer; nothing initializes those of Apertus."""
    model = tiny_model(kind, 0)
    name, buffer = next((name, b) for name, b in model.named_buffers() if name.endswith(suffix))
    buffer.copy_(torch.randn(buffer.shape))
    model.save_pretrained(tmp_path)
    for found in pool.run(buffer_of, 2, tmp_path, name):
        assert torch.equal(found, buffer)


def test_weights_are_not_rounded_on_their_way_to_the_masters(pool: WorkerPool, tmp_path: Path) -> None:
    """fp32 weights in the file reach the fp32 master weights without rounding."""
    model = tiny_llama(seed=3)
    model.save_pretrained(tmp_path)
    masters = pool.run(masters_of, 2, tmp_path)
    for name, p in model.named_parameters():
        pieces = [rank[name] for rank in masters if name in rank]
        assert torch.equal(torch.cat(pieces), p.detach().flatten()), name


def masters_of(ctx: RankContext, directory: Path) -> dict[str, Tensor]:
    made = model_with_source(load_config(str(directory)), str(directory), from_scratch=False, seed=0)
    config = config_of(3, bf16={"enabled": True})
    engine = launcher.initialize(model=made.model, config=config, source=made.source, device=DEVICE)[0]
    return {piece.name: piece.data.clone() for piece in engine.zero.slices()}
