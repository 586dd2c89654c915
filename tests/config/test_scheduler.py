from typing import Any

import pytest

from launcher.config import (
    ConfigProblems,
    OneCycleParams,
    SchedulerConfig,
    WarmupCosineLRParams,
    WarmupDecayLRParams,
    WarmupLRParams,
    load,
)
from launcher.config.scheduler import PARAMS


def built(kind: str, **params: object) -> SchedulerConfig:
    scheduler = load({"scheduler": {"type": kind, "params": params}}).scheduler
    assert scheduler is not None
    return scheduler


def notes(kind: str, optimizer: str = "AdamW", **params: object) -> str:
    config = load({"optimizer": {"type": optimizer}, "scheduler": {"type": kind, "params": params}})
    return "\n".join(str(note) for note in config.notes if note.path[0] == "scheduler")


def test_each_type_has_its_params_and_defaults() -> None:
    constant = built("WarmupLR").params
    assert isinstance(constant, WarmupLRParams)
    assert (constant.warmup_min_lr, constant.warmup_max_lr, constant.warmup_num_steps) == (0.0, None, 1000)
    assert (constant.warmup_type, constant.last_batch_iteration) == ("log", -1)
    decay = built("WarmupDecayLR", total_num_steps=5000, warmup_type="linear").params
    assert isinstance(decay, WarmupDecayLRParams)
    assert (decay.total_num_steps, decay.warmup_max_lr, decay.warmup_type) == (5000, 1e-3, "linear")
    cosine = built("WarmupCosineLR", total_num_steps=5e3).params
    assert isinstance(cosine, WarmupCosineLRParams)
    assert (cosine.total_num_steps, cosine.warmup_min_ratio, cosine.cos_min_ratio) == (5000, 0.0, 1e-4)
    cycle = built("OneCycle", cycle_min_lr=[1e-4, 1e-3], cycle_max_lr=[1e-3, 1e-2]).params
    assert isinstance(cycle, OneCycleParams)
    assert (cycle.cycle_min_lr, cycle.cycle_max_lr) == ((1e-4, 1e-3), (1e-3, 1e-2))


CYCLE = {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}
PYTHON = "or build it and pass initialize(lr_scheduler=...)"


@pytest.mark.parametrize(
    ("kind", "params", "words"),
    [
        ("WarmupDecayLR", {}, "scheduler.params.total_num_steps: required key is missing"),
        (
            "WarmupCosineLR",
            {"total_num_steps": 9, "warmup_max_lr": 1},
            "WarmupCosineLR does not have this key",
        ),
        ("WarmupLR", {"warmup_type": "linaer"}, 'did you mean "linear"?'),
        ("WarmupLR", {"warmup_num_step": 9}, "did you mean `scheduler.params.warmup_num_steps`?"),
        ("WarmupLR", {"warmup_num_steps": -1}, "scheduler.params.warmup_num_steps: must be at least 0"),
        ("WarmupLR", {"warmup_num_steps": 2.5}, "must be a whole number"),
        ("WarmupLR", {"warmup_max_lr": "fast"}, "must be a number of at least 0, or a list"),
        ("WarmupLR", {"warmup_max_lr": [0.1, -1]}, "must be a number of at least 0, or a list"),
        ("WarmpLR", {}, 'did you mean "WarmupLR"?'),
        ("OneCycle", {"cycle_min_lr": 0.1}, "scheduler.params.cycle_max_lr: required key is missing"),
        ("OneCycle", CYCLE | {"cycle_max_lr": 1e-5}, "cycle_max_lr: 1e-05 is below cycle_min_lr 0.0001"),
        ("OneCycle", CYCLE | {"cycle_min_lr": [1e-4, 1]}, "cycle_max_lr: 0.001 is below cycle_min_lr 1"),
        ("OneCycle", CYCLE | {"cycle_min_mom": 0.95}, "cycle_max_mom: 0.9 is below cycle_min_mom 0.95"),
        ("OneCycle", CYCLE | {"cycle_max_mom": 1}, "cycle_max_mom: momentum must be in [0, 1)"),
        ("OneCycle", CYCLE | {"cycle_first_step_size": 0}, "must be at least 1"),
        (
            "OneCycle",
            {"cycle_min_lr": [1, 2], "cycle_max_lr": [1, 2, 3]},
            "has 3 values, but cycle_min_lr has 2",
        ),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "lr_range_test_step_size: must be at least 1"),
        (
            "LRRangeTest",
            {"lr_range_test_stair": True},
            "did you mean `scheduler.params.lr_range_test_staircase`?",
        ),
        ("CosineAnnealingLR", {}, "scheduler.params.T_max: required key is missing"),
        ("CosineAnnealingLR", {"T_max": "auto"}, ""),
        ("StepLR", {"step_size": 3, "T_max": 9}, "StepLR does not have this key; another type does"),
        ("StepLR", {"step_size": 3, "last_epoch": 7}, "needs an `initial_lr` in every param group"),
        ("StepLR", {"step_size": 0.5}, "must be a whole number"),
        ("MultiStepLR", {"milestones": 5}, "must be a list of optimizer steps, not 5"),
        ("LinearLR", {"start_factor": 0}, "must be more than 0"),
        ("ConstantLR", {"factor": 1.5}, "must be at most 1"),
        ("CyclicLR", {"base_lr": 0.1, "max_lr": 0.01}, "max_lr: 0.01 is below base_lr 0.1"),
        ("CyclicLR", {"base_lr": 0.1, "max_lr": 1, "mode": "trianglar"}, 'did you mean "triangular"?'),
        ("CyclicLR", {"base_lr": 0.1, "max_lr": 1, "scale_fn": "lambda"}, "use `mode`"),
        (
            "OneCycleLR",
            {"max_lr": 0.1},
            "total_steps: is required unless both epochs and steps_per_epoch are set",
        ),
        (
            "LambdaLR",
            {},
            f"LambdaLR needs a Python function\n      fix: use another type, {PYTHON}",
        ),
        ("MultiplicativeLR", {}, "needs a Python function"),
        ("SequentialLR", {}, "needs schedules built in Python"),
        ("ChainedScheduler", {}, "needs schedules built in Python"),
        ("ReduceLROnPlateau", {}, "needs a metric at each step"),
        ("Nothing", {}, 'unknown scheduler type "Nothing"'),
    ],
)
@pytest.mark.key("scheduler.type")
def test_refusals(kind: str, params: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigProblems) as caught:
        load({"scheduler": {"type": kind, "params": params}}).resolve(dp_degree=1)
    assert words in str(caught.value)


def test_cycled_momentum_needs_momentum() -> None:
    params: dict[str, Any] = {"base_lr": 0.1, "max_lr": 1}
    config = {"optimizer": {"type": "Adagrad"}, "scheduler": {"type": "CyclicLR", "params": params}}
    with pytest.raises(ConfigProblems, match="the optimizer Adagrad has no momentum"):
        load(config)
    params["cycle_momentum"] = False
    load(config)


def test_params_may_be_left_out_and_surprises_are_told() -> None:
    bare = load({"scheduler": {"type": "WarmupLR"}}).scheduler
    assert (
        bare is not None and isinstance(bare.params, WarmupLRParams) and bare.params.warmup_num_steps == 1000
    )
    long = notes("WarmupDecayLR", total_num_steps=100)
    assert "warm-up of 1000 steps does not end before total_num_steps 100" in long
    assert 'the warm-up is logarithmic, as in DeepSpeed; write "linear"' in notes("WarmupLR")
    assert "logarithmic" not in notes("WarmupLR", warmup_type="log")
    assert "[the cycle's momentum, 0.99]" in notes("OneCycle", **CYCLE)
    assert "SGD has no betas: its momentum stays" in notes("OneCycle", "SGD", **CYCLE)
    assert notes("OneCycle", cycle_momentum=False, **CYCLE) == ""
    assert "there is no decay while decay_step_size is 0" in notes("OneCycle", decay_lr_rate=0.1, **CYCLE)
    growing = notes(
        "OneCycle", decay_mom_rate=0.1, decay_step_size=10, cycle_min_mom=0.4, cycle_max_mom=0.5, **CYCLE
    )
    assert "reaches 1 at optimizer step 4100" in growing
    assert "scale_mode: has no effect here" in notes("CyclicLR", base_lr=0, max_lr=1, scale_mode="iterations")


def test_every_torch_class_is_taken_or_refused_with_a_reason() -> None:
    torch = pytest.importorskip("torch")
    from launcher.config.scheduler import NEED_PYTHON

    schedules = torch.optim.lr_scheduler
    classes = {
        name
        for name in schedules.__all__
        if isinstance(getattr(schedules, name), type) and name != "LRScheduler"
    }
    assert classes <= set(PARAMS) | set(NEED_PYTHON)
