"""Helpers, groups and schedules that scripts import from deepspeed."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import launcher
from launcher.config import load
from launcher.errors import ConfigError
from launcher.integrations import groups, lr_schedules, utilities
from launcher.integrations.surface import NAMES, NotHere, getter, serve
from launcher.optim.schedules import build_scheduler
from tests.engine.driving import config_of
from tests.pool import RankContext, WorkerPool
from tests.pool.device import DEVICE
from tests.pool.reference import tiny_llama

SCHEDULES: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.1, "warmup_num_steps": 5},
    "WarmupDecayLR": {
        "total_num_steps": 20,
        "warmup_max_lr": 0.1,
        "warmup_num_steps": 5,
        "warmup_type": "linear",
    },
    "WarmupCosineLR": {"total_num_steps": 20, "warmup_num_steps": 5},
    "OneCycle": {"cycle_min_lr": 0.001, "cycle_max_lr": 0.1, "cycle_first_step_size": 6},
    "LRRangeTest": {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 4},
}


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=0.1)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_as_a_class_is_that_of_the_json(name: str) -> None:
    keywords = SCHEDULES[name]
    mine = getattr(lr_schedules, name)(optimizer(), **keywords)
    config = load({"train_batch_size": 1, "scheduler": {"type": name, "params": keywords}}).scheduler
    assert config is not None
    json = build_scheduler(config, optimizer())
    assert [each for each in SCHEDULES if isinstance(json, getattr(lr_schedules, each))] == [name]
    shown = [each for each in lr_schedules.ATTRIBUTES if hasattr(mine, each)]
    assert shown and all(getattr(json, each) == getattr(mine, each) for each in shown)
    with pytest.raises(AttributeError):  # the curve would not change with it
        setattr(mine, shown[0], 3)
    for _ in range(25):
        mine.step()
        json.step()
        assert mine.get_last_lr() == json.get_last_lr() and mine.get_lr_ratio() == json.get_lr_ratio()


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_rate_that_is_a_tensor_stays_that_tensor(name: str) -> None:
    rate = torch.tensor(0.1, dtype=torch.float64)
    tensor, plain = torch.optim.SGD([torch.ones(1)], lr=rate), torch.optim.SGD([torch.ones(1)], lr=0.1)
    schedules = [getattr(lr_schedules, name)(each, **SCHEDULES[name]) for each in (tensor, plain)]
    for _ in range(3):
        assert tensor.param_groups[0]["lr"] is rate
        assert rate.item() == pytest.approx(plain.param_groups[0]["lr"], rel=1e-12)
        for schedule in schedules:
            schedule.step()
    schedules[0].load_state_dict(schedules[1].state_dict())
    assert tensor.param_groups[0]["lr"] is rate


def test_a_warmup_of_no_number_is_refused() -> None:
    for schedule, more in (
        (lr_schedules.WarmupLR, {}),
        (lr_schedules.WarmupCosineLR, {"total_num_steps": 9}),
    ):
        with pytest.raises(ValueError, match="warmup_num_steps is None"):
            schedule(optimizer(), warmup_num_steps=None, **more)


def test_one_cycle_tells_the_high_momentum_and_starts_with_the_low_one() -> None:
    adam = optimizer()
    schedule = lr_schedules.OneCycle(
        adam, cycle_min_lr=0.1, cycle_max_lr=0.2, cycle_min_mom=0.8, cycle_max_mom=0.9
    )
    assert schedule.get_mom() == [(0.9, 0.99)] and adam.param_groups[0]["betas"] == (0.8, 0.99)


def test_a_schedule_shows_its_keywords() -> None:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.1, 0.2)]
    warm = lr_schedules.WarmupLR(torch.optim.SGD(groups, lr=0.1), warmup_num_steps=1)
    assert (warm.min_lrs, warm.max_lrs, warm.warmup_num_steps) == ([0.0, 0.0], [0.1, 0.2], 2)
    cosine = lr_schedules.WarmupCosineLR(optimizer(), total_num_steps=9, warmup_num_steps=4)
    assert (cosine.warmup_type, cosine.total_num_steps, cosine.get_lr_ratio()) == ("log", 9, 0.0)
    cosine.step(4)
    assert cosine.get_lr_ratio() == pytest.approx(cosine.get_lr()[0] / 0.1)
    cycle = lr_schedules.OneCycle(optimizer(), cycle_min_lr=0.1, cycle_max_lr=0.2, cycle_first_step_size=6)
    assert (cycle.min_lrs, cycle.max_moms, cycle.step_ratio) == ([0.1], [(0.9, 0.99)], 0.5)
    assert not hasattr(cycle, "warmup_type")


def test_schedules_take_positions_and_name_what_they_do_not_take() -> None:
    assert lr_schedules.WarmupLR(optimizer(), 0.0, 0.5, 2, "linear").get_last_lr() == [0.0]
    with pytest.raises((ConfigError, ValueError), match="warmup_steps"):
        lr_schedules.WarmupLR(optimizer(), warmup_steps=3)


def test_a_loader_repeats_and_parts_are_balanced() -> None:
    loader = utilities.RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]
    assert utilities.partition_uniform(10, 3) == [0, 4, 7, 10]
    assert utilities.partition_balanced([1, 1, 1, 9], 2) == [0, 3, 4]


def test_tensors_are_built_where_it_is_said() -> None:
    with utilities.OnDevice(dtype=torch.bfloat16, device="meta"):
        layer = torch.nn.Linear(2, 2)
    assert layer.weight.is_meta and layer.weight.dtype == torch.bfloat16
    assert torch.empty(1).dtype == torch.float32


def test_what_is_logged_on_which_rank(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "launcher"):
        utilities.log_dist("everywhere", ranks=[-1])
        utilities.log_dist("elsewhere", ranks=[7])
        utilities.see_memory_usage("quiet")
        utilities.see_memory_usage("now", force=True)
    said = caplog.text
    assert "everywhere" in said and "GiB" in said and "elsewhere" not in said and "quiet" not in said


def sizes(ctx: RankContext) -> list[int]:
    config = config_of(1, train_batch_size=8, tensor_parallel={"autotp_size": 2})
    engine = launcher.initialize(model=tiny_llama(layers=2), config=config, device=DEVICE)[0]
    found = [
        groups.get_data_parallel_world_size(),
        groups.get_data_parallel_rank(),
        groups.get_model_parallel_world_size(),
        groups.get_tensor_model_parallel_rank(),
        groups.get_tensor_model_parallel_src_rank(),
    ]
    engine.destroy()
    return found


def test_groups_are_those_of_the_engine(pool: WorkerPool) -> None:
    assert pool.run(sizes, 2) == [[1, 0, 2, 0, 0], [1, 0, 2, 1, 0]]


def test_every_name_leads_somewhere() -> None:
    """Imports each name as a script does; unavailable names raise a clear error."""
    serve()
    import importlib

    lost = []
    for module, names in NAMES.items():
        for name in names:
            home, _, attribute = names[name].partition(":")
            if attribute and not hasattr(importlib.import_module(home), attribute):
                lost.append(f"{module}.{name}")
    assert lost == []
    with pytest.raises(NotHere, match="InferenceEngineV3"):
        getter("")("InferenceEngineV3")
