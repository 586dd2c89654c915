"""Layouts: all candidates are valid configurations, and the fastest that fit are found."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import LlamaConfig

from launcher.config import load
from launcher.monitor.device_budget import DeviceBudget
from launcher.monitor.devices import device
from launcher.plan.choose import PlanSearch, choose, reasons, states
from launcher.plan.layout import Layout, as_json, layouts, meshes
from launcher.plan.memory import MemoryPredictor
from launcher.plan.speed import step_time
from launcher.plan.work import ModelWork, work_of

WORK = ModelWork(
    layers=32, hidden=4096, heads=32, sequence=4096, parameters=8 * 10**9, flops=7e13, traffic=1e11
)
H100 = device("h100")
PLACE = PlanSearch(H100, 8, DeviceBudget(H100.memory))


def kept(layout: Layout) -> float:
    """Approximate the activations of blocks."""
    block = WORK.sequence * WORK.hidden * layout.micro * (2 if layout.recompute else 34 / layout.tp)
    return block * WORK.layers / layout.pp * min(layout.pp, layout.accumulation)


def needs(layout: Layout, limit: float = 0) -> int:
    """Approximate a rank's memory, precisely enough to distinguish layouts."""
    mine = WORK.parameters / (layout.tp * layout.pp)
    sharded = [0, 12, 14, 16][min(layout.stage, 3 if layout.pp == 1 else 1)]
    return int(mine * (16 - sharded + sharded / layout.dp) + kept(layout))


def test_meshes_use_all_ranks_and_fit_the_model() -> None:
    found = list(meshes(WORK, 48))
    assert all(tp * pp * dp * cp == 48 for tp, pp, dp, cp in found)
    assert {tp for tp, _, _, _ in found} == {1, 2, 4, 8, 16}
    assert max(pp for _, pp, _, _ in found) == 24  # 48 stages would leave some without a block
    assert len(set(found)) == len(found)
    assert {cp for *_, cp in found} == {1}  # the sequence is short


def test_long_sequences_are_shared() -> None:
    """No rank has memory for one of them, and one sequence per step leaves nothing for dp."""
    work = replace(WORK, sequence=131072, flops=32 * WORK.flops, traffic=32 * WORK.traffic, groups=8)
    ways = list(layouts(work, 16, 1))
    assert {way.cp for way in ways} == {1, 2, 4, 8, 16} and {way.dp for way in ways} == {1}
    shared = [way for way in ways if way.mesh == (1, 1, 1, 16, 1) and way.stage == 3 and way.recompute]
    assert load(as_json(shared[0])).cp_degree == 16
    times = {way.cp: step_time(work, way, H100, 8) for way in ways if way.mesh[:2] == (1, 1)}
    assert times[16].compute == pytest.approx(step_time(work, Layout(), H100, 8).compute / 16)
    inside, across = (step_time(work, Layout(cp=16), H100, node).cp for node in (16, 8))
    assert 0 < inside < across < times[16].compute


def test_packed_weights_are_not_split() -> None:
    work = replace(WORK, adapters=10**7, weight_flops=0.9 * WORK.flops)
    assert {way.tp for way in layouts(work, 8, 64)} == {1, 2, 4, 8}
    ways = list(layouts(replace(work, packed=True), 8, 64))
    assert {way.tp for way in ways} == {1} and {way.pp for way in ways} == {1, 2, 4, 8}
    held = {way.stage: states(work, way) for way in ways if way.offload == "none" and way.pp == 1}
    assert held[0] == 2 * work.parameters + 14 * work.adapters
    assert held[3] == held[0] / 8


def test_experts_are_shared() -> None:
    """Across nodes it is faster to send tokens to 56 of 60 billion parameters than to gather these."""
    experts = {"experts": 64, "expert_parameters": 56 * 10**9, "expert_layers": 32, "picked": 4}
    work = replace(WORK, parameters=60 * 10**9, **experts)
    ways = [
        way
        for way in layouts(work, 64, 64)
        if way.mesh[:2] == (1, 1) and way.micro == 1 and not way.recompute
    ]
    assert {way.ep for way in ways} == {1, 2, 4, 8, 16, 32, 64}
    assert {way.ep for way in layouts(WORK, 64, 64)} == {1}
    spread = next(way for way in ways if way.ep == 8 and way.stage == 1)
    assert load(as_json(spread)).expert_parallel.degree == 8
    gathered = next(way for way in ways if way.ep == 1 and way.stage == 3)
    times = [step_time(work, way, H100, 8) for way in (spread, gathered)]
    assert times[0].total < times[1].total and times[0].experts > 0 == times[1].experts
    assert states(work, spread) < states(work, replace(spread, ep=1))
    uneven = step_time(replace(work, expert_load=2.0), spread, H100, 8)
    assert uneven.experts > 1.5 * times[0].experts and uneven.compute > times[0].compute


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_every_layout_is_a_configuration(dtype: str) -> None:
    """Degrees, batch and the rest round-trip through the JSON."""
    ways = list(layouts(WORK, 16, 64))
    for way in ways[:: len(ways) // 60]:
        config = load(as_json(way, dtype=dtype))
        assert config.dp_degree(16) == way.dp
        assert config.pipeline.degree == way.pp
        assert way.micro * way.accumulation * way.dp == 64
        assert config.zero_optimization.stage == way.stage
        assert config.pipeline.chunks_of_rank == way.chunks or way.pp == 1


@pytest.mark.parametrize(("memory_gib", "more"), [(80, 1.0), (40, 1.3), (16, 1.6)])
def test_of_each_mesh_the_fastest_that_fits(memory_gib: int, more: float) -> None:
    """This includes layouts that need more than was predictable."""

    def takes(layout: Layout, limit: float = 0) -> int:
        return int(more * needs(layout))

    ways, place = list(layouts(WORK, 16, 64)), PlanSearch(H100, 8, DeviceBudget(memory_gib * 2**30))
    found = choose(WORK, place, ways, takes, kept, top=100)
    fitting = [way for way in ways if takes(way) <= place.budget.memory]
    assert {choice.layout.mesh for choice in found} == {way.mesh for way in fitting}
    for choice in found:
        rivals = [way for way in fitting if way.mesh == choice.layout.mesh]
        least = min(step_time(WORK, way, H100, 8).total for way in rivals)
        assert step_time(WORK, choice.layout, H100, 8).total == pytest.approx(least)
    assert [choice.time.total for choice in found] == sorted(choice.time.total for choice in found)


def test_what_cannot_run_is_no_choice() -> None:
    assert choose(WORK, PLACE, layouts(WORK, 16, 64), lambda layout, _: None, kept) == []


def test_memory_is_asked_seldom() -> None:
    asked = []
    ways = list(layouts(WORK, 64, 256))
    choose(WORK, PLACE, ways, lambda layout, _: asked.append(layout) or needs(layout), kept)
    assert len(asked) < len(ways) / 40
    assert all(states(WORK, way) + kept(way) <= PLACE.budget.memory for way in asked)


def test_the_least_is_less_than_what_is_needed() -> None:
    for way in layouts(WORK, 16, 64, offloads=("none",)):
        assert states(WORK, way) + kept(way) <= needs(way) * (1 + 1e-9)


def test_reasons_name_what_would_be_worse() -> None:
    found = choose(WORK, PLACE, layouts(WORK, 64, 256), needs, kept)
    said = list(reasons(WORK, PLACE, found[0], needs, 256))
    assert any("slower" in line for line in said)
    assert not any("faster" in line for line in said)


def test_less_memory_makes_other_layouts() -> None:
    small = PlanSearch(H100, 8, DeviceBudget(12 * 2**30))
    best = choose(WORK, small, layouts(WORK, 16, 64), needs, kept)[0].layout
    assert best.stage == 3 or best.tp * best.pp > 1
    assert needs(best) <= small.budget.memory


@pytest.mark.full
def test_blocks_keep_no_more_than_is_needed() -> None:
    """Every excluded option is too large."""
    model = LlamaConfig(vocab_size=512, num_hidden_layers=8, hidden_size=256, intermediate_size=688)
    work = work_of(model, 256)
    memory = MemoryPredictor(model, work)
    ways = [way for way in layouts(work, 8, 32, offloads=("none",), stages=(0, 2, 3)) if way.tp < 8]
    put_off = [way for way in ways if way.schedule.startswith("zb") and way.recompute and way.pp == 8]
    tried = 0
    for way in [*ways[:: len(ways) // 30], *put_off[:: max(1, len(put_off) // 10)]]:
        peak = memory.peak(way)
        if peak is not None:
            tried += 1
            assert 0 < memory.kept(way) + states(work, way) <= peak, way
    assert tried > 30
