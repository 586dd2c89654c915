"""The JSON's own rules: which one applies to a parameter, and where it splits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from launcher.config import PartitionConfig, load
from launcher.errors import ConfigError
from launcher.tensor.user_plan import check_rules, dim_along, rule_for, rules_of, sizes_along

KEY = "tensor_parallel.partition_config"
NAMES = ["model.layers.0.attn.qkv.weight", "model.layers.0.attn.o.weight", "model.norm.weight"]


def partition(*specs: dict[str, Any], **others: Any) -> PartitionConfig:
    written = {"autotp_size": 2, "partition_config": {"layer_specs": list(specs), **others}}
    config = load({"tensor_parallel": written}).tensor_parallel.partition_config
    assert config is not None
    return config


def only(**spec: Any) -> Any:
    return rules_of(partition({"patterns": [".*"], **spec}), "llama")[0]


@pytest.mark.key(f"{KEY}.layer_specs[].patterns", f"{KEY}.layer_specs[].partition_type")
def test_the_first_pattern_that_matches_counts() -> None:
    config = partition(
        {"patterns": [r".*\.o\.weight$", "norm"], "partition_type": "ROW"},
        {"patterns": [r".*\.(o|qkv)\.weight$"]},
        {"patterns": [".*attn"], "partition_type": "skip", "grad_allreduce": True},
    )
    rules = rules_of(config, "llama")
    found = [rule_for(rules, name) for name in NAMES]
    assert [rule and rule.kind for rule in found] == ["column", "row", None]  # "norm" does not begin the name
    bias = rule_for(rules, "model.layers.0.attn.o.bias")
    assert bias is not None and bias.kind == "skip" and bias.grad_allreduce


@pytest.mark.key(f"{KEY}.layer_specs[].model_types", f"{KEY}.layer_specs[].gather_output")
def test_a_rule_may_be_for_some_models() -> None:
    config = partition({"patterns": [".*qkv"], "model_types": ["Phi3"], "gather_output": True})
    assert rules_of(config, "llama") == []
    assert [rule.gather_output for rule in rules_of(config, "phi3")] == [True]


@pytest.mark.key(f"{KEY}.use_default_specs")
def test_without_defaults_the_plan_of_the_model_says_nothing() -> None:
    rules = rules_of(partition({"patterns": [".*qkv"]}, use_default_specs=False), "llama")
    assert [getattr(rule_for(rules, name), "kind", None) for name in NAMES] == ["column", "skip", "skip"]


def test_a_rule_that_matches_nothing_is_an_error() -> None:
    config = partition({"patterns": [".*qkv", r".*\.o_prj"]})
    with pytest.raises(
        ConfigError, match=r"\"\.\*\\\.o_prj\" matches no parameter(.|\n)*layer_specs\[0\]\.patterns\[1\]"
    ):
        check_rules(config, rules_of(config, "llama"), NAMES)


@pytest.mark.key(f"{KEY}.strict_mode")
def test_strict_mode_wants_a_word_on_every_linear_layer() -> None:
    for defaults in (True, False):
        config = partition({"patterns": [".*qkv"]}, strict_mode=True, use_default_specs=defaults)
        rules = rules_of(config, "llama")
        check_rules(config, rules, NAMES, linear=NAMES[:1])
        with pytest.raises(ConfigError, match=r"1 weights of linear layers have no rule: .*attn\.o\.weight"):
            check_rules(config, rules, NAMES, linear=NAMES[:2])


def test_the_models_own_plan_is_a_word_too_unless_it_is_off() -> None:
    for defaults in (True, False):
        config = partition({"patterns": [".*qkv"]}, strict_mode=True, use_default_specs=defaults)
        rules = rules_of(config, "llama")
        if defaults:
            check_rules(config, rules, NAMES, linear=NAMES[:2], planned=NAMES[1:2])
        else:
            with pytest.raises(ConfigError, match=r"have no rule: .*attn\.o\.weight"):
                check_rules(config, rules, NAMES, linear=NAMES[:2], planned=NAMES[1:2])


CUTS = [  # rule, shape of the parameter, dim, sizes
    ({}, (12, 5), 0, (12,)),
    ({"partition_type": "row"}, (12, 5), 1, (5,)),
    ({"partition_dim": 1}, (4, 12, 5), 1, (12,)),
    ({"shape": [3, -1]}, (12, 5), 0, (4, 4, 4)),
    ({"shape": [3, -1]}, (12,), 0, (4, 4, 4)),  # the bias of that weight
    ({"shape": [[8, 2, 2], -1]}, (12, 5), 0, (8, 2, 2)),
    ({"shape": [[8, 2, 2], -1]}, (12,), 0, (8, 2, 2)),
    ({"shape": [4, -1, 5], "partition_dim": 1}, (12, 5), 0, (3, 3, 3, 3)),  # experts one above the other
    ({"shape": [2, [4, 2], 5], "partition_dim": 1}, (12, 5), 0, (4, 2, 4, 2)),
    ({"shape": [2, [1, 2], 2, 5], "partition_dim": 1}, (12, 5), 0, (2, 4, 2, 4)),
    ({"shape": [-1, 2], "partition_type": "row"}, (5, 12), 1, (6, 6)),
    ({"shape": [4, 2, 5], "partition_dim": 1}, (4, 12, 5), 1, (6, 6)),  # experts in a dim of their own
    ({"shape": [-1, 1], "partition_type": "row"}, (6, 1), 1, (1,)),
]  # fmt: skip


@pytest.mark.key(f"{KEY}.layer_specs[].shape", f"{KEY}.layer_specs[].partition_dim")
@pytest.mark.parametrize(("spec", "shape", "dim", "sizes"), CUTS)
def test_where_a_rule_cuts(
    spec: dict[str, Any], shape: tuple[int, ...], dim: int, sizes: tuple[int, ...]
) -> None:
    rule = only(**spec)
    assert (dim_along(rule, shape), sizes_along(rule, shape)) == (dim, sizes)


@pytest.mark.parametrize(
    ("spec", "shape", "why"),
    [
        ({"partition_dim": 2}, (12, 5), "dim 2 is split, but does not exist"),
        ({"shape": [5, -1]}, (12, 5), "12 cannot be divided into 5 equal parts"),
        ({"shape": [[8, 2], -1]}, (13, 5), "a different number of elements"),
        ({"shape": [3, -1], "partition_type": "row"}, (12,), "a bias does not have"),
        ({"shape": [-1, 3, -1], "partition_dim": 1}, (12, 5), "only one -1 can be inferred"),
        ({"shape": [4, 15]}, (12, 5), "is not compatible with its dims"),
    ],
)
def test_a_rule_that_does_not_fit_says_why(spec: dict[str, Any], shape: tuple[int, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        sizes_along(only(**spec), shape)


@given(st.integers(1, 3), st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(1, 3))
def test_the_sizes_are_those_of_the_view(blocks: int, parts: list[int], inner: int) -> None:
    """Part j of the view has the sizes given for part j."""
    rows = blocks * sum(parts) * inner
    rule = only(shape=[blocks, parts, inner, 2], partition_dim=1)
    weight = torch.arange(rows * 2).view(rows, 2)
    sizes = sizes_along(rule, weight.shape)
    views = weight.view(blocks, sum(parts), inner, 2).split(parts, 1)
    cut = weight.split(sizes)
    for j, view in enumerate(views):
        assert torch.equal(torch.cat(cut[j :: len(parts)]).reshape(-1), view.reshape(-1))
