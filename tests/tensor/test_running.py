"""A run over tp and dp matches one process: losses, norms, checkpoints, exports, initial values."""

from __future__ import annotations

import math
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from launcher.comm import record_collectives
from launcher.engine.weights import model_with_source
from launcher.errors import LauncherError
from launcher.models.build import build_on_meta, load_config
from launcher.zero.features.overflow import find_overflows, watch_gradients
from tests.engine.driving import counted_reads
from tests.models.truth import materialize
from tests.pool import RankContext, WorkerPool
from tests.pool.logical import logical_parameters
from tests.pool.reference import PlainRun, batch, tiny_llama, train_plain
from tests.tensor.running import CLIP, LR, advance, config_of, engine_of, whole_state

STEPS, VOCAB = 3, 67  # a vocabulary that no degree divides


def llama(tied: bool = False) -> Any:
    """Return a model with 4 heads and 2 key-value heads: four tp ranks hold each of these in pairs."""
    return tiny_llama(tied, layers=2, vocab=VOCAB)


@cache
def truth(tied: bool) -> PlainRun:
    adamw = partial(torch.optim.AdamW, lr=LR, weight_decay=0.1)
    return train_plain(llama(tied), batch, adamw, STEPS + 1, clip=CLIP)


def train_and_save(
    ctx: RankContext,
    tp: int,
    stage: int,
    tied: bool,
    sequence: bool,
    sections: dict[str, Any],
    directory: Path,
) -> dict[str, Any]:
    engine = engine_of(tp, config_of(stage, **sections), llama(tied), sequence=sequence)
    losses, norms = advance(engine, range(STEPS))
    engine.save_checkpoint(directory, "saved")
    engine.save_16bit_model(directory / "model")
    state = whole_state(engine)
    consolidated = engine._zero3_consolidated_16bit_state_dict()
    with record_collectives() as records:
        more = advance(engine, [STEPS])
    return {
        "losses": losses + more[0],
        "norms": norms + more[1],
        "state": state,
        "consolidated": consolidated,
        "partial": sum(r.tag == "root/partial" for r in records),
        "samples": engine.global_samples,
        "layout": [(flat.name, flat.numel, [s.offset for s in flat.slots]) for flat in engine.zero.flats],
    }


def load_and_train(ctx: RankContext, tp: int, stage: int, tied: bool, directory: Path) -> dict[str, Any]:
    engine = engine_of(tp, config_of(stage), llama(tied))
    advance(engine, [7])
    torch.manual_seed(ctx.rank)
    engine.load_checkpoint(directory, "saved")
    draws = torch.rand(2).tolist()
    engine.save_16bit_model(directory / f"model{tp}")
    state = whole_state(engine)
    losses, norms = advance(engine, [STEPS])
    return {"losses": losses, "norms": norms, "state": state, "draws": draws}


ACCUMULATION: dict[str, Any] = {"gradient_accumulation_steps": 2}
MICS = {"zero_optimization": {"stage": 3, "mics_shard_size": 1}}
CASES = [
    (2, 0, False, False, {}),
    (2, 1, True, False, ACCUMULATION),
    (2, 2, False, True, {}),
    (2, 3, True, False, {}),
    (4, 2, False, False, ACCUMULATION),
    (2, 3, False, True, MICS),
]


@pytest.mark.pairwise
@pytest.mark.parametrize(("tp", "stage", "tied", "sequence", "sections"), CASES)
def test_it_trains_saves_and_exports_as_one_process_does(
    pool: WorkerPool,
    tmp_path: Path,
    tp: int,
    stage: int,
    tied: bool,
    sequence: bool,
    sections: dict[str, Any],
) -> None:
    """Then one process loads the checkpoint at another stage, and continues."""
    ranks = pool.run(train_and_save, 4, tp, stage, tied, sequence, sections, tmp_path)
    want = truth(tied)
    for rank in ranks:
        assert rank["losses"] == pytest.approx(want.losses, rel=1e-5)
        assert rank["norms"] == pytest.approx(want.grad_norms, rel=1e-4)
        assert rank["norms"] == ranks[0]["norms"]
        assert rank["samples"] == 8 * (STEPS + 1)
        assert rank["layout"] == ranks[0]["layout"]
    # one sum of partial gradients a step: of key-value heads that ranks share, of norms on slices of the sequence
    assert max(rank["partial"] for rank in ranks) == (1 if tp == 4 or sequence else 0)
    (alone,) = pool.run(load_and_train, 1, 1, (stage + 1) % 4, tied, tmp_path)
    assert alone["losses"] == pytest.approx(want.losses[STEPS:], rel=1e-5)
    state = ranks[0]["state"]
    assert state.keys() == alone["state"].keys()
    for name, value in state.items():
        assert torch.equal(alone["state"][name], value), name
    configs = [(tmp_path / name / "config.json").read_text() for name in ("model", "model1")]
    assert configs[0] == configs[1]
    exported = load_file(tmp_path / "model" / "model.safetensors")
    again = load_file(tmp_path / "model1" / "model.safetensors")
    assert exported.keys() == again.keys()
    assert all(torch.equal(again[name], value) for name, value in exported.items())
    assert all(torch.equal(ranks[0]["consolidated"][name], value) for name, value in exported.items())


def save_alone(ctx: RankContext, directory: Path) -> dict[str, Tensor]:
    engine = engine_of(1, config_of(1), llama())
    advance(engine, range(STEPS))
    torch.manual_seed(11)
    engine.save_checkpoint(directory, "saved")
    return whole_state(engine)


def test_a_checkpoint_of_one_process_is_loaded_at_any_degree(pool: WorkerPool, tmp_path: Path) -> None:
    (state,) = pool.run(save_alone, 1, tmp_path)
    drawn = torch.rand(2, generator=torch.Generator().manual_seed(11)).tolist()
    for tp, stage in ((4, 0), (2, 3)):
        ranks = pool.run(load_and_train, 4, tp, stage, False, tmp_path)
        assert all(
            rank["draws"] == drawn for rank in ranks[:tp]
        )  # a tp group draws the same: that of its dp rank
        for rank in ranks:
            assert rank["losses"] == pytest.approx(truth(False).losses[STEPS:], rel=1e-5)
            assert all(torch.equal(rank["state"][name], value) for name, value in state.items())


# ---- first values -------------------------------------------------------------------------------


def start(ctx: RankContext, directory: Path, stage: int) -> tuple[list[dict[str, Tensor]], int]:
    """Return the weights from a file and from the seed, and the elements that this rank read."""
    stored = model_with_source(load_config(str(directory)), str(directory), from_scratch=False, seed=0)
    with counted_reads() as read:
        engines = [engine_of(2, config_of(stage), stored.model, source=stored.source)]
    engines.append(engine_of(2, config_of(stage), build_on_meta(load_config(str(directory))), seed=5))
    # each rank has built another model: the first one's counts
    engines.append(engine_of(2, config_of(stage), tiny_llama(vocab=VOCAB, layers=2, seed=ctx.rank)))
    return [{name: p.clone() for name, p in logical_parameters(engine.zero)} for engine in engines], sum(read)


@pytest.mark.parametrize("stage", [0, 3])
def test_first_values_are_those_of_one_process(pool: WorkerPool, tmp_path: Path, stage: int) -> None:
    model = tiny_llama(tied=True, vocab=VOCAB, layers=2, seed=3)
    model.save_pretrained(tmp_path)
    seeded = build_on_meta(model.config)
    materialize(seeded, 5)
    replicated = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    total = sum(p.numel() for p in model.parameters()) + replicated  # over the two tp ranks
    ranks = pool.run(start, 4, tmp_path, stage)
    for weights, _ in ranks:
        for found, wanted in zip(weights, (model, seeded, llama()), strict=True):
            for name, p in wanted.named_parameters():
                assert torch.equal(found[name], p), name
    read = sum(elements for _, elements in ranks)
    if stage == 0:
        assert read == 2 * total  # both ranks of dp keep everything
    else:
        assert total <= read <= total + 2 * replicated + 64  # small ones persist: both ranks of dp read them


# ---- what a step looks at -----------------------------------------------------------------------


def overflow(ctx: RankContext, stage: int) -> tuple[list[str], float]:
    engine = engine_of(2, config_of(stage), llama())
    ids = batch(0)[:4]
    loss = engine(input_ids=ids, labels=ids).loss
    if ctx.rank == 3:  # the second of dp and of tp
        weight = engine.zero.slots["model.layers.1.mlp.down_proj.weight"].leaf
        weight.register_hook(lambda grad: grad * torch.inf)
    watch_gradients(engine.zero, True)
    loss.backward()
    found = [f"{item.name} {item.ranks}" for item in find_overflows(engine.zero)]
    return found, float(engine.zero.norm_and_use()[0])


@pytest.mark.parametrize("stage", [1, 3])
def test_all_ranks_see_the_overflow_of_one(pool: WorkerPool, stage: int) -> None:
    for found, squares in pool.run(overflow, 4, stage):
        assert found == ["model.layers.1.mlp.down_proj.weight (3,)"]
        assert not math.isfinite(squares)


def differing(ctx: RankContext, stage: int) -> list[str]:
    sections = {"zero_optimization": {"stage": stage, "enable_sanity_checks": True}}
    engine = engine_of(2, config_of(0, **sections), llama())
    for length in (16, 12):  # nothing to tell, though sequences of the second dp rank are shorter
        ids = batch(0)[:4, : length - 2 * engine.mesh.dp.rank]
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    if engine.zero.tp.rank == 1:
        for piece in engine.zero.slices():
            if piece.name == "model.layers.0.input_layernorm.weight":
                piece.data.add_(1)
    engine.zero.publish()
    try:
        advance(engine, [2])
    except LauncherError as error:
        return [str(error)]
    return []


@pytest.mark.parametrize("stage", [0, 2])
def test_sanity_checks_compare_what_tp_ranks_share(pool: WorkerPool, stage: int) -> None:
    messages = pool.run(differing, 4, stage)
    assert all(
        len(told) == 1 and "the part of unit model.layers.0 on 2 tp ranks" in told[0] for told in messages
    )
