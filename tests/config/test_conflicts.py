"""Rules across several keys: their keys exist, and they are checked once all of them are known."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from launcher.config import Config, ConfigProblems, load
from launcher.config.conflicts import ACROSS, WITHIN
from launcher.config.problems import dotted
from launcher.config.rules import REMARKS, Rule
from launcher.config.schema import implemented_paths


def problems(tree: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(ConfigProblems) as caught:
        load(tree)
    return {dotted(problem.path): problem.what for problem in caught.value.problems}


def test_rules_name_keys_of_the_schema() -> None:
    rules = [rule for rule in (*WITHIN, *ACROSS, *REMARKS) if isinstance(rule, Rule)]
    assert [key for rule in rules for key in rule.keys if key not in implemented_paths(Config)] == []
    assert all(rule.fix for rule in (*WITHIN, *ACROSS) if isinstance(rule, Rule))


def scheduler(kind: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": params}}


def test_an_open_key_is_in_no_contradiction_until_it_is_known() -> None:
    cycle = scheduler("OneCycle", cycle_min_lr="auto", cycle_max_lr=0.1)
    config = load({"train_batch_size": 1, **cycle})
    with pytest.raises(ConfigProblems, match=r"0\.1 is below cycle_min_lr 0\.2"):
        config.resolve(dp_degree=1, auto={"scheduler.params.cycle_min_lr": 0.2})
    zero = {"stage": "auto", "offload_optimizer": {"device": "cpu"}}
    config = load({"train_batch_size": 1, "zero_optimization": zero})
    assert config.resolve(dp_degree=1, auto={"zero_optimization.stage": 2}).zero_optimization.stage == 2
    with pytest.raises(ConfigProblems, match="does not shard it"):
        config.resolve(dp_degree=1, auto={"zero_optimization.stage": 0})


@pytest.mark.parametrize(
    ("tree", "key", "words"),
    [
        (scheduler("WarmupLR", warmup_min_lr=[0.1, 0.2], warmup_max_lr=[0.1, 0.2, 0.3]), "warmup_max_lr", "3 values"),
        (scheduler("OneCycleLR", total_steps=9, max_lr=[0.1, 0.2], max_momentum=[0.9]), "max_momentum", "has 1 values"),
        (scheduler("ConstantLR", factor=0), "factor", "must be more than 0"),
        (scheduler("CyclicLR", max_lr=0.1, last_epoch=3), "last_epoch", "needs an `initial_lr`"),
        (
            {"torch_autocast": {"enabled": True, "lower_precision_safe_modules": ["Linear"]}},
            "torch_autocast.lower_precision_safe_modules",
            "is not a fully qualified name",
        ),
    ],
)  # fmt: skip
def test_what_would_end_the_start_is_told_before(tree: dict[str, Any], key: str, words: str) -> None:
    path = key if "." in key else f"scheduler.params.{key}"
    assert words in problems(tree)[path]


def test_lists_of_momentum_that_nothing_cycles_are_not_compared() -> None:
    params = {"total_steps": 9, "max_lr": [0.1, 0.2], "max_momentum": [0.9], "cycle_momentum": False}
    assert load(scheduler("OneCycleLR", **params))


def test_a_missing_key_hides_no_contradiction_of_the_others() -> None:
    found = problems(scheduler("OneCycle", cycle_min_lr=0.1, cycle_min_mom=0.9, cycle_max_mom=0.8))
    assert "required key is missing" in found["scheduler.params.cycle_max_lr"]
    assert "is below cycle_min_mom" in found["scheduler.params.cycle_max_mom"]


VALUES = [
    0,
    1,
    2,
    0.5,
    "auto",
    None,
    True,
    False,
    [],
    [0.1],
    [9, 3],
    ["x"],
    "x",
    "1e-3",
    {},
    {"enabled": True},
]


def test_no_values_make_a_rule_fail() -> None:
    dice = random.Random(0)
    keys = [key for rule in (*WITHIN, *ACROSS, *REMARKS) if isinstance(rule, Rule) for key in rule.keys]
    keys += [
        f"elasticity.{key}" for key in ("max_train_batch_size", "micro_batch_sizes", "min_gpus", "max_gpus")
    ]
    for _ in range(1500):
        tree: dict[str, Any] = {
            "scheduler": {"type": dice.choice(["OneCycle", "CyclicLR", "OneCycleLR", "WarmupLR"])}
        }
        for key in dice.sample(keys, 8):
            *sections, name = key.split(".")
            inner = tree
            for section in sections:
                inner[section] = inner.get(section) if isinstance(inner.get(section), dict) else {}
                inner = inner[section]
            inner[name] = copy.deepcopy(dice.choice(VALUES))  # sections of later keys are put into it
        try:
            load(tree)
        except ConfigProblems as error:
            assert error.problems
