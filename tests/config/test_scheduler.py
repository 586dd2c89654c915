import pytest

from launcher.config import (
    ConfigProblems,
    SchedulerConfig,
    WarmupCosineLRParams,
    WarmupDecayLRParams,
    WarmupLRParams,
    load,
)


def built(kind: str, **params: object) -> SchedulerConfig:
    scheduler = load({"scheduler": {"type": kind, "params": params}}).scheduler
    assert scheduler is not None
    return scheduler


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


@pytest.mark.parametrize(
    ("kind", "params", "words"),
    [
        ("WarmupDecayLR", {}, "scheduler.params.total_num_steps: is required"),
        ("WarmupCosineLR", {"total_num_steps": 9, "warmup_max_lr": 1}, "WarmupCosineLR has no such key"),
        ("WarmupLR", {"warmup_type": "linaer"}, 'did you mean "linear"?'),
        ("WarmupLR", {"warmup_num_step": 9}, "did you mean `scheduler.params.warmup_num_steps`?"),
        ("WarmupLR", {"warmup_num_steps": 0}, "must be at least 1"),
        ("WarmupLR", {"warmup_num_steps": 2.5}, "must be a whole number"),
        ("WarmpLR", {}, 'did you mean "WarmupLR"?'),
        ("OneCycle", {"cycle_min_lr": 0.1}, "the schedule OneCycle is not implemented here yet"),
        ("CosineAnnealingLR", {}, "the schedule CosineAnnealingLR is not implemented here yet"),
        ("Nothing", {}, 'there is no schedule the text "Nothing"'),
    ],
)
def test_refusals(kind: str, params: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigProblems) as caught:
        load({"scheduler": {"type": kind, "params": params}})
    assert words in str(caught.value)


def test_params_may_be_left_out_and_a_long_warmup_is_told() -> None:
    bare = load({"scheduler": {"type": "WarmupLR"}}).scheduler
    assert bare is not None and bare.params.warmup_num_steps == 1000
    params = {"total_num_steps": 100}
    notes = load({"scheduler": {"type": "WarmupDecayLR", "params": params}}).notes
    assert any("warm-up of 1000 steps is not over at total_num_steps 100" in str(note) for note in notes)
