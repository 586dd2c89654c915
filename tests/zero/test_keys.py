"""Keys of `zero_optimization` and their effects: what is gathered, and how much is in flight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from launcher.config import ConfigProblems, ZeroConfig, load
from launcher.zero.unit import Unit
from tests.engine.driving import STAGES, advance, config_of, engine_of
from tests.pool import RankContext, WorkerPool
from tests.pool.reference import tiny_llama
from tests.zero.models import stack
from tests.zero.training import Case, train, watch_in_flight

KEY = "zero_optimization."
BLOCK = 288  # elements of a block of the Stack, slots at multiples of 16
ALONE = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}


# ---- stage 3: what is gathered at a time ----------------------------------------------------------


def gathered(ctx: RankContext, zero: dict[str, Any]) -> tuple[int, int, int]:
    """Return for the third step: (peak gathered elements, peak prefetched units, gathers)."""
    engine = engine_of(config_of(3, zero_optimization={"stage": 3, **zero}), stack(depth=6))
    unsharder = engine.zero.unsharder
    advance(engine, ctx, range(2))
    live, ahead, starts = [0], [0], 0
    use, start = unsharder.use, unsharder._start

    def watched_start(unit: Unit, phase: str) -> None:
        nonlocal starts
        starts += unit not in unsharder.unsharded
        start(unit, phase)
        live.append(unsharder.live)

    def watched_use(unit: Unit, phase: str) -> None:
        before = starts + (unit not in unsharder.unsharded)
        use(unit, phase)
        ahead.append(starts - before)

    unsharder._start, unsharder.use = watched_start, watched_use
    advance(engine, ctx, [2])
    return max(live), max(ahead), starts


@pytest.mark.key(KEY + "stage3_prefetch_bucket_size", KEY + "overlap_comm")
def test_units_gathered_ahead(pool: WorkerPool) -> None:
    sizes = {0: 0, BLOCK: 1, 3 * BLOCK: 3}
    for size, units in sizes.items():
        zero = {"stage3_prefetch_bucket_size": size, **ALONE}
        assert pool.run(gathered, 2, zero)[0][1] == units
        assert pool.run(gathered, 2, {**zero, "overlap_comm": False})[0][1] == 0


@pytest.mark.key(KEY + "stage3_max_live_parameters", KEY + "stage3_max_reuse_distance")
def test_units_kept(pool: WorkerPool) -> None:
    """Within the reuse distance a block is gathered once per step; the limit on live elements takes precedence."""
    everything = {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}
    kept = pool.run(gathered, 2, {**everything, "stage3_max_reuse_distance": 10**9})[0]
    near = pool.run(gathered, 2, {**everything, "stage3_max_reuse_distance": 2 * BLOCK})[0]
    freed = pool.run(gathered, 2, {**everything, "stage3_max_reuse_distance": 0})[0]
    bounded = pool.run(gathered, 2, {**everything, "stage3_max_live_parameters": 2 * BLOCK})[0]
    assert kept[2] < near[2] < freed[2]
    assert kept[0] > bounded[0] >= freed[0]
    assert bounded[0] <= 4 * BLOCK  # the limit, the block in use, and the root


# ---- the step, and reductions ---------------------------------------------------------------------


def tiles(ctx: RankContext, stage: int, size: int) -> list[int]:
    """Return the elements that each call of the inner optimizer steps."""
    engine = engine_of(config_of(stage, zero_optimization={"stage": stage, "sub_group_size": size}))
    seen: list[int] = []

    def watch(inner: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        seen.append(sum(p.numel() for g in inner.param_groups for p in g["params"] if p.grad is not None))

    engine.optimizer.inner.register_step_pre_hook(watch)  # a hooked optimizer is called, tile by tile
    advance(engine, ctx, [0])
    return seen


@pytest.mark.key(KEY + "sub_group_size")
@pytest.mark.parametrize("stage", [0, 3])
def test_elements_stepped_at_a_time(pool: WorkerPool, stage: int) -> None:
    whole, small = pool.run(tiles, 2, stage, 10**9)[0], pool.run(tiles, 2, stage, 130)[0]
    assert sum(whole) == sum(small)
    assert max(small) <= 136 < max(whole)  # a slice is never cut: the largest has 128 and some


def in_flight(ctx: RankContext, stage: int, overlap: bool) -> int:
    """Return the peak gradient elements in flight when a unit has been handed over."""
    engine = engine_of(config_of(stage, zero_optimization={"stage": stage, "overlap_comm": overlap}))
    seen = watch_in_flight(engine)
    advance(engine, ctx, [0])
    return max(seen)


@pytest.mark.key(KEY + "overlap_comm")
@pytest.mark.parametrize("stage", STAGES)
def test_reductions_run_on_or_are_waited_for(pool: WorkerPool, stage: int) -> None:
    assert pool.run(in_flight, 2, stage, True)[0] >= BLOCK
    assert pool.run(in_flight, 2, stage, False)[0] == 0


# ---- keys that change nothing here ----------------------------------------------------------------


def other_values(stage: int) -> dict[str, Any]:
    switches = {key: ZeroConfig.model_fields[key].get_default() for key in ZeroConfig.without_effect}
    return {key: {} if default is None else not default for key, default in switches.items()}


@pytest.mark.key(*(KEY + key for key in ZeroConfig.without_effect))
@pytest.mark.parametrize("stage", STAGES)
def test_keys_without_effect_warn_and_have_none(pool: WorkerPool, stage: int) -> None:
    """Collectives, bytes and results are identical with all of them at another value."""
    keys = other_values(stage)
    notes = [str(note) for note in load({"zero_optimization": {"stage": stage, **keys}}).notes]
    for key in keys:
        assert any(f"zero_optimization.{key}: has no effect here" in note for note in notes), key
    plain = pool.run(train, 2, Case(stage, steps=3))[0]
    with_keys = pool.run(train, 2, Case(stage, steps=3, zero=keys))[0]
    assert with_keys.losses == plain.losses and with_keys.held == plain.held
    assert with_keys.records == plain.records


def saved(ctx: RankContext, directory: Path, gather: bool) -> bool:
    config = config_of(3, zero_optimization={"stage": 3, "stage3_gather_16bit_weights_on_model_save": gather})
    return bool(engine_of(config, tiny_llama(layers=1)).save_16bit_model(directory))


@pytest.mark.key(KEY + "stage3_gather_16bit_weights_on_model_save")
def test_whole_weights_are_written_either_way(pool: WorkerPool, tmp_path: Path) -> None:
    """DeepSpeed writes nothing useful without the key; here `save_16bit_model` is explicit and works."""
    for gather in (True, False):
        assert pool.run(saved, 2, tmp_path / str(gather), gather) == [True, True]
    files = [load_file(tmp_path / str(gather) / "model.safetensors") for gather in (True, False)]
    assert files[0].keys() == files[1].keys() == dict(tiny_llama(layers=1).named_parameters()).keys()
    assert all((files[1][name] == p).all() for name, p in tiny_llama(layers=1).named_parameters())


# ---- keys that are refused ------------------------------------------------------------------------


@pytest.mark.key(
    KEY + "zeropp_loco_param",
    KEY + "zeropp_loco_param.err_beta",
    KEY + "zeropp_loco_param.reset_T",
)
@pytest.mark.parametrize(
    ("zero", "said"),
    [
        ({"zeropp_loco_param": {"err_beta": 0.8}}, "zeropp_loco_param.* which DeepSpeed removed"),
        ({"zeropp_loco_param": {"reset_T": 1024}}, "zeropp_loco_param.* which DeepSpeed removed"),
    ],
)
def test_old_keys_are_refused(zero: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigProblems, match=said):
        load({"zero_optimization": zero})


@pytest.mark.key(
    *(KEY + key for key in (
        "zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_nontrainable_weights",
        "zero_quantized_gradients", "mics_shard_size", "mics_hierarchical_params_gather",
    ))
)  # fmt: skip
@pytest.mark.parametrize(
    ("zero", "said"),
    [
        ({"stage": 2, "zero_hpz_partition_size": 2}, "zero_hpz_partition_size needs sharded parameters"),
        ({"stage": 2, "zero_quantized_weights": True}, "zero_quantized_weights needs sharded parameters"),
        ({"stage": 1, "zero_quantized_nontrainable_weights": True}, "but stage 1 does not shard them"),
        ({"stage": 0, "zero_quantized_gradients": True}, "zero_quantized_gradients applies to shards"),
        ({"stage": 0, "mics_shard_size": 2}, "mics_shard_size applies to shards"),
        ({"stage": 3, "mics_shard_size": 0}, "must be -1 .* or a number of ranks, not 0"),
        ({"stage": 3, "mics_shard_size": 2, "zero_hpz_partition_size": 2}, "both set the groups"),
        (
            {"stage": 3, "mics_hierarchical_params_gather": True},
            "groups of mics_shard_size, which is not set",
        ),
        (
            {"stage": 2, "zero_quantized_gradients": True, "reduce_scatter": False},
            "quantizes a reduce-scatter",
        ),
    ],
)
def test_what_cannot_stand_together_is_refused(zero: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigProblems, match=said):
        load({"zero_optimization": zero})
