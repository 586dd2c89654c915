"""Values are read as intended: if DeepSpeed accepts a quoted number or 1 for true, so do we."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.config import ConfigProblems, load
from tests.config.test_check import nested

MEANT: list[tuple[str, list[Any], Any]] = [  # key, ways to write it, what it is
    ("train_batch_size", ["8", 8.0, "8.0", " 8 "], 8),
    ("zero_optimization.stage", ["2", 2.0, "2.0"], 2),
    ("zero_optimization.reduce_bucket_size", ["5e8", 5e8, "500000000", "500_000_000"], 500_000_000),
    ("gradient_clipping", ["1e-3", "0.001"], 0.001),
    ("zero_optimization.overlap_comm", ["true", "True", "yes", "on", "1", 1, 1.0], True),
    ("zero_optimization.overlap_comm", ["false", "FALSE", "no", "off", "0", 0, 0.0], False),
    ("wall_clock_breakdown", ["true", 1], True),
    ("prescale_gradients", ["false", 0], False),
]


@pytest.mark.parametrize(("key", "ways", "meant"), MEANT)
def test_a_value_is_read_as_it_is_meant(key: str, ways: list[Any], meant: Any) -> None:
    for way in ways:
        config = load(nested(key, way))
        assert config == load(nested(key, meant))
        value = config.to_dict()
        for part in key.split("."):
            value = value[part]
        assert value == meant and type(value) is type(meant)
        assert [note for note in config.notes if key in str(note)] == []


def test_numbers_inside_of_lists() -> None:
    params = {"lr": "2e-4", "betas": ["0.9", "0.95"], "eps": "1e-8", "weight_decay": "0"}
    config = load({"optimizer": {"type": "AdamW", "params": params}})
    assert config.optimizer is not None
    assert config.optimizer.params.to_dict()["betas"] == [0.9, 0.95]
    assert config.optimizer.params.lr == 2e-4


@pytest.mark.parametrize("off", ["false", 0, "0", "off"])
def test_a_switch_that_is_off_in_whatever_way(off: Any) -> None:
    """Disabled sections that are not implemented, or that are converted, have no effect."""
    for section in ("hybrid_engine", "autotuning", "progressive_layer_drop", "amp", "curriculum_learning"):
        assert load({section: {"enabled": off}}) == load({}), section
    for key in ("quantize_training", "graph_harvesting"):
        assert load({key: off}) == load({}), key
    assert load({"zero_optimization": {"cpu_offload": off}}) == load({})
    assert load({"sequence_parallel_size": "1"}) == load({})


@pytest.mark.parametrize("on", ["true", 1, "1", "on"])
def test_a_switch_that_is_on_in_whatever_way(on: Any) -> None:
    zero = {"stage": 2, "cpu_offload": True}
    assert load({"zero_optimization": {**zero, "cpu_offload": on}}) == load({"zero_optimization": zero})
    assert load({"fp16": {"fp16": on}}) == load({"fp16": {"enabled": True}})
    assert load({"amp": {"enabled": on, "opt_level": "O2"}}) == load({"fp16": {"enabled": True}})
    with pytest.raises(ConfigProblems, match="not implemented"):
        load({"hybrid_engine": {"enabled": on}})


def test_a_text_stays_a_text() -> None:
    assert load({"wandb": {"enabled": True, "group": "1", "team": "true"}}).wandb.group == "1"
    for number in ("nan", "inf", "1" * 500):
        with pytest.raises(ConfigProblems):
            load({"gradient_clipping": number})
