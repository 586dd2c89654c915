"""Training with offloaded shards is bit-identical in losses and weights to training without.

An optimizer on the host of a GPU rounds differently from one on the GPU; there the results are equal up to rounding.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from launcher.config import ConfigProblems, load
from launcher.errors import OffloadError
from tests.engine.driving import advance, config_of, engine_of, microbatches, whole_state, whole_weights
from tests.pool import RankContext, WorkerPool
from tests.pool.device import assert_alike

KEY = "zero_optimization"
STEPS = 3
NVME = {"device": "nvme"}
ALL_ON_NVME = NVME | {"max_in_cpu": 0}


def placed(section: dict[str, Any], directory: str) -> dict[str, Any]:
    """Return a section, with a directory if it needs one."""
    return section | {"nvme_path": directory} if section["device"] == "nvme" else section


def json_of(stage: int, directory: str, offload: dict[str, Any], **sections: Any) -> dict[str, Any]:
    config = config_of(stage, sections.pop("accumulation", 1), **sections)
    for key, value in offload.items():
        config[KEY][key] = placed(value, directory) if isinstance(value, dict) else value
    return config


def trained(
    ctx: RankContext, config: dict[str, Any], steps: int = STEPS
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor], dict[str, int]]:
    """Return losses, weights, states, and the memory of a rank between steps."""
    engine = engine_of(config)
    losses = advance(engine, ctx, range(steps))
    engine.zero.placements.buffers.wait_for_writes()
    held = engine.held_bytes()
    state = whole_state(engine)
    weights = whole_weights(engine)
    engine.destroy()
    return losses, weights, state, held


PLACES: dict[str, dict[str, Any]] = {
    "optimizer-cpu": {"offload_optimizer": {"device": "cpu"}},
    "optimizer-nvme": {"offload_optimizer": NVME},
    "optimizer-nvme-in-turn": {"offload_optimizer": NVME | {"pipeline_read": False, "pipeline_write": False}},
    "half-of-it-nvme": {"offload_optimizer": NVME | {"ratio": 0.5}},
    "param-cpu": {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
    "param-nvme": {"offload_param": ALL_ON_NVME},
    "all-nvme": {"offload_param": ALL_ON_NVME, "offload_optimizer": NVME},
    "param-nvme-optimizer-cpu": {"offload_param": ALL_ON_NVME, "offload_optimizer": {"device": "cpu"}},
}
RUNS = [
    pytest.param(world, stage, dtype, place, id=f"{world}-z{stage}-{dtype or 'fp32'}-{place}")
    for world, stage, dtype, place in itertools.product((1, 2), (1, 2, 3), ("", "bf16"), PLACES)
    if stage == 3 or "offload_param" not in PLACES[place]
]
_without: dict[Any, Any] = {}


@pytest.mark.pairwise
@pytest.mark.parametrize(("world", "stage", "dtype", "place"), RUNS)
@pytest.mark.key(f"{KEY}.offload_optimizer.device", f"{KEY}.offload_param.device")
def test_bit_for_bit(
    pool: WorkerPool, tmp_path: Path, world: int, stage: int, dtype: str, place: str
) -> None:
    precision = {dtype: {"enabled": True}} if dtype else {}
    sections = {"accumulation": 2, "gradient_clipping": 0.1, **precision}
    if (world, stage, dtype) not in _without:
        plain = pool.run(trained, world, json_of(stage, "", {}, **sections))
        _without[world, stage, dtype] = plain[0]
    losses, weights, state, held = pool.run(
        trained, world, json_of(stage, str(tmp_path), PLACES[place], **sections)
    )[0]
    want = _without[world, stage, dtype]
    assert_alike((losses, weights, state), want[:3], bf16=bool(dtype))
    left = [path for path in tmp_path.iterdir()]
    assert not left, "nothing is left of a run that has ended"
    optimizer = PLACES[place].get("offload_optimizer", {})
    if optimizer.get("device") == "nvme" and "ratio" not in optimizer:
        assert held["optimizer"] == held["master"] == 0
        assert stage == 1 or held["gradients"] == 0
    if PLACES[place].get("offload_param", {}).get("device") == "nvme":
        assert held["parameters"] == 0


def by_whole_steps(
    ctx: RankContext, config: dict[str, Any]
) -> tuple[list[float], dict[str, Tensor], list[tuple[int, int]], bool, list[float | None]]:
    """Return losses and weights.

    For each step, how many buffers were stepped before it and how many there are; whether a gradient was ever written;
    norms.
    """
    engine = engine_of(config)
    losses, early, norms = [], [], []
    for step in range(STEPS):
        parts = microbatches(ctx, step, engine.gradient_accumulation_steps())
        losses.append(engine.run_microbatches(parts, [1 / len(parts)] * len(parts)))
        early.append((len(engine.optimizer.early), len(engine.zero.gradients)))
        engine.step()
        norms.append(engine.get_global_grad_norm())
    wrote = any("gradient" in key for tier in engine.zero.placements.tiers for key in tier._index)
    weights = whole_weights(engine)
    engine.destroy()
    return losses, weights, early, wrote, norms


@pytest.mark.parametrize(
    ("world", "dtype", "place"),
    [(1, "", "optimizer-nvme"), (2, "", "all-nvme"), (2, "bf16", "optimizer-nvme")],
)
def test_buffers_are_stepped_while_the_backward_runs(
    pool: WorkerPool, tmp_path: Path, world: int, dtype: str, place: str
) -> None:
    precision = {dtype: {"enabled": True, "check_grad_overflow": False}} if dtype else {}
    want = pool.run(by_whole_steps, world, json_of(3, "", {}, accumulation=1, **precision))[0]
    got = pool.run(
        by_whole_steps, world, json_of(3, str(tmp_path), PLACES[place], accumulation=1, **precision)
    )[0]
    assert_alike((got[0], got[1], got[4]), (want[0], want[1], want[4]), bf16=bool(dtype))
    assert [before for before, _ in want[2]] == [0] * STEPS
    assert all(before == every > 1 for before, every in got[2])
    assert not got[3], "a gradient that is used at once needs no disk"


@pytest.mark.parametrize("sections", [{"gradient_clipping": 0.1}, {"accumulation": 2}], ids=str)
def test_what_is_known_late_is_stepped_late(
    pool: WorkerPool, tmp_path: Path, sections: dict[str, Any]
) -> None:
    """Clipping needs the norm of all gradients.

    With accumulation, the last microbatch's gradients are added to earlier ones.
    """
    want = pool.run(by_whole_steps, 2, json_of(3, "", {}, **sections))[0]
    got = pool.run(by_whole_steps, 2, json_of(3, str(tmp_path), PLACES["all-nvme"], **sections))[0]
    assert_alike((got[0], got[1], got[4]), (want[0], want[1], want[4]))
    assert all((before == 0) == ("gradient_clipping" in sections) for before, _ in got[2])


OPTIMIZERS = [
    {"type": "Adagrad", "params": {"lr": 0.01, "initial_accumulator_value": 0.1}},
    {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}},
    {"type": "Lion", "params": {"lr": 0.001}},
    {"type": "AdamW", "params": {"lr": 0.01, "bias_correction": False}},
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda value: value["type"])
def test_other_optimizers(pool: WorkerPool, tmp_path: Path, optimizer: dict[str, Any]) -> None:
    want = pool.run(trained, 2, json_of(3, "", {}, optimizer=optimizer))[0]
    got = pool.run(trained, 2, json_of(3, str(tmp_path), PLACES["all-nvme"], optimizer=optimizer))[0]
    assert_alike(got[:3], want[:3])


def client(ctx: RankContext, config: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    engine = engine_of(config, optimizer=lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5))
    losses = advance(engine, ctx, range(STEPS))
    weights = whole_weights(engine)
    engine.destroy()
    return losses, weights


def test_a_client_optimizer(pool: WorkerPool, tmp_path: Path) -> None:
    want = pool.run(client, 2, json_of(2, "", {}, optimizer=None))[0]
    got = pool.run(client, 2, json_of(2, str(tmp_path), PLACES["optimizer-nvme"], optimizer=None))[0]
    assert_alike(got[:2], want[:2])


def resumed(ctx: RankContext, first: dict[str, Any], then: dict[str, Any], directory: str) -> list[Any]:
    """Train two steps with one JSON, save, and train two more with another."""
    one = engine_of(first)
    advance(one, ctx, range(2))
    one.save_checkpoint(directory)
    after_save = advance(one, ctx, range(2, 4))
    one.destroy()
    two = engine_of(then)
    two.load_checkpoint(directory)
    after_load = advance(two, ctx, range(2, 4))
    weights = whole_weights(two)
    two.destroy()
    return [after_save, after_load, weights]


@pytest.mark.parametrize("dtype", ["", "bf16"])
def test_a_checkpoint_of_a_run_on_nvme_goes_on_in_memory_and_back(
    pool: WorkerPool, tmp_path: Path, dtype: str
) -> None:
    precision = {dtype: {"enabled": True}} if dtype else {}
    there = json_of(3, str(tmp_path / "nvme"), PLACES["all-nvme"], **precision)
    here = json_of(3, "", {}, **precision)
    (tmp_path / "nvme").mkdir()
    found = [
        pool.run(resumed, 2, first, then, str(tmp_path / f"{number}"))[0]
        for number, (first, then) in enumerate([(there, here), (here, there), (there, there)])
    ]
    for after_save, after_load, weights in found:
        assert_alike(
            (after_save, after_load, weights), (found[0][0], found[0][0], found[0][2]), bf16=bool(dtype)
        )


def frozen(ctx: RankContext, config: dict[str, Any]) -> tuple[list[float], dict[str, Tensor], int]:
    from tests.zero.models import stack

    model = stack()
    first = next(iter(model.parameters()))
    first.requires_grad_(False)
    engine = engine_of(config, model)
    losses = advance(engine, ctx, range(STEPS))
    engine.zero.placements.buffers.wait_for_writes()
    held = engine.held_bytes()["parameters"]
    weights = whole_weights(engine)
    engine.destroy()
    return losses, weights, held


def test_frozen_parameters_rest_too(pool: WorkerPool, tmp_path: Path) -> None:
    want = pool.run(frozen, 2, json_of(3, "", {}))[0]
    got = pool.run(frozen, 2, json_of(3, str(tmp_path), PLACES["all-nvme"]))[0]
    assert got[2] == 0
    assert_alike(got[:2], want[:2])


def edited(ctx: RankContext, config: dict[str, Any]) -> dict[str, Tensor]:
    """A user modifies a parameter between steps."""
    from launcher.zero import GatheredParameters

    engine = engine_of(config)
    advance(engine, ctx, range(1))
    parameter = next(iter(engine.module.parameters()))
    with GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
        if ctx.rank == 0:
            next(iter(engine.module.parameters())).fill_(0.25)
    advance(engine, ctx, range(1, 2))
    weights = whole_weights(engine)
    engine.destroy()
    return weights


def test_an_edit_of_a_parameter_on_nvme_is_kept(pool: WorkerPool, tmp_path: Path) -> None:
    want = pool.run(edited, 2, json_of(3, "", {}))[0]
    assert_alike(pool.run(edited, 2, json_of(3, str(tmp_path), PLACES["all-nvme"]))[0], want)


# ---- what the keys do ---------------------------------------------------------------------------


def placements(ctx: RankContext, config: dict[str, Any]) -> dict[str, list[str]]:
    """Return the placement of the buffers after a step."""
    engine = engine_of(config)
    advance(engine, ctx, range(1))
    found = {
        "parameters": [_words(flat.params_placement) for flat in engine.zero.flats if flat.sharded],
        "optimizer": [_words(gradient.flat.optim_placement) for gradient in engine.zero.gradients],
        "numel": [str(gradient.flat.numel) for gradient in engine.zero.gradients],
        "ahead": [str(engine.zero.placements.max_loaded_numel), str(engine.zero.placements.max_loaded_units)],
        "buffers": [
            str(engine.zero.placements.buffers.leaving),
            str(engine.zero.placements.buffers.make.keywords["pin"]),
        ],
        "reads_ahead": [str(engine.zero.placements.reads_ahead)],
    }
    engine.destroy()
    return found


def _words(placement: Any) -> str:
    return "memory" if placement.tier is None else str(placement.tier.name)


@pytest.mark.key(f"{KEY}.offload_optimizer.ratio", f"{KEY}.offload_optimizer.device_budget")
def test_a_part_of_the_state_stays_on_the_device(pool: WorkerPool, tmp_path: Path) -> None:
    def found(**keys: Any) -> tuple[int, int]:
        places = pool.run(placements, 2, json_of(2, str(tmp_path), {"offload_optimizer": NVME | keys}))[0]
        return places["optimizer"].count("memory"), places["optimizer"].count("nvme")

    none, every = found()
    assert none == 0
    assert found(ratio=0.0) == (every, 0)
    some = found(ratio=0.5)
    assert 0 < some[0] < every and some[0] + some[1] == every
    assert 0 < found(device_budget=2_000)[0] < every


@pytest.mark.key(
    f"{KEY}.offload_param.max_in_cpu",
    f"{KEY}.offload_param.host_budget",
    f"{KEY}.offload_param.device_budget",
    f"{KEY}.offload_optimizer.host_budget",
)
def test_host_memory_is_filled_before_nvme(pool: WorkerPool, tmp_path: Path) -> None:
    def found(of: str, **keys: Any) -> list[str]:
        section = f"offload_{'param' if of == 'parameters' else of}"
        return pool.run(placements, 2, json_of(3, str(tmp_path), {section: NVME | keys}))[0][of]

    assert set(found("parameters", max_in_cpu=0)) == {"nvme"}
    assert set(found("parameters")) == {"memory"}, "the default is 1e9 elements"
    for keys in ({"max_in_cpu": 200}, {"host_budget": 800}, {"max_in_cpu": 0, "device_budget": 800}):
        assert set(found("parameters", **keys)) == {"memory", "nvme"}, keys
    assert set(found("optimizer", host_budget=2_000)) == {"memory", "nvme"}


@pytest.mark.key(
    f"{KEY}.offload_param.buffer_count",
    f"{KEY}.offload_param.buffer_size",
    f"{KEY}.offload_optimizer.buffer_count",
    f"{KEY}.offload_optimizer.pipeline_read",
    f"{KEY}.offload_optimizer.pipeline_write",
    f"{KEY}.offload_param.pin_memory",
    f"{KEY}.offload_optimizer.pin_memory",
    f"{KEY}.offload_param.nvme_path",
    f"{KEY}.offload_optimizer.nvme_path",
)
def test_how_much_is_under_way(pool: WorkerPool, tmp_path: Path) -> None:
    offload = {
        "offload_param": ALL_ON_NVME | {"buffer_count": 3, "buffer_size": 100, "pin_memory": False},
        "offload_optimizer": NVME | {"buffer_count": 2},
    }
    found = pool.run(placements, 2, json_of(3, str(tmp_path), offload))[0]
    assert found["ahead"] == ["300", "3"]
    assert found["buffers"] == ["2", "False"]
    assert found["reads_ahead"] == ["True"]
    offload["offload_optimizer"] |= {"pipeline_read": False, "pipeline_write": False}
    found = pool.run(placements, 2, json_of(3, str(tmp_path), offload))[0]
    assert found["buffers"][0] == "0" and found["reads_ahead"] == ["False"]


@pytest.mark.key(f"{KEY}.sub_group_size")
def test_sub_groups_are_what_is_in_memory_at_a_time(pool: WorkerPool, tmp_path: Path) -> None:
    whole = pool.run(placements, 2, json_of(3, str(tmp_path), {"offload_optimizer": NVME}))[0]["numel"]
    config = json_of(3, str(tmp_path), {"offload_optimizer": NVME, "sub_group_size": 64})
    cut = pool.run(placements, 2, config)[0]["numel"]
    assert len(cut) > len(whole) and max(map(int, cut)) < max(map(int, whole))


@pytest.mark.parametrize("kind", ["Lamb", "Muon"])
def test_optimizers_of_whole_parameters_are_refused(kind: str) -> None:
    with pytest.raises(ConfigProblems, match="needs whole parameters"):
        load({"optimizer": {"type": kind}, KEY: {"stage": 2, "offload_optimizer": placed(NVME, "/tmp")}})


def test_a_missing_directory_is_named(pool: WorkerPool, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="not-there"):
        pool.run(trained, 1, json_of(2, str(tmp_path / "not-there"), PLACES["optimizer-nvme"]))


def crowded(ctx: RankContext, config: dict[str, Any]) -> str:
    with torch.device("meta"):
        model = torch.nn.Linear(1 << 20, 1 << 18, bias=False)  # 1 TiB in fp32
    try:
        engine_of(config, model)
    except OffloadError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("offload", ["all-nvme", "param-nvme"])
def test_a_disk_that_is_too_small_is_known_before_anything_is_made(
    pool: WorkerPool, tmp_path: Path, offload: str
) -> None:
    said = pool.run(crowded, 2, json_of(3, str(tmp_path), PLACES[offload]))[0]
    assert "bytes are needed" in said and str(tmp_path) in said
    assert [path.name for path in tmp_path.iterdir()] == []
