"""Costs of blocks and ends of Hugging Face models: estimates compared with counted operations, for every method."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from launcher.errors import ConfigError
from launcher.models.build import build_on_meta
from launcher.models.units import unit_modules
from launcher.monitor.flops import ModuleMeter
from launcher.pipeline.hf.costs import LayerCosts, balance, deal, model_costs
from tests.models.tiny import config_of
from tests.models.truth import materialize

SEQUENCE = 16


def meta(family: str = "llama", **changes: Any) -> nn.Module:
    return build_on_meta(config_of(family, **changes))


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gpt_neox"])
def test_best_is_what_a_forward_computes(family: str) -> None:
    model = meta(family)
    costs = model_costs(model, "best", sequence=SEQUENCE)
    materialize(model, 0)
    meter = ModuleMeter(model, torch.device("cpu"))
    with meter.counting(backward=False), torch.no_grad():
        model(input_ids=torch.zeros(1, SEQUENCE, dtype=torch.long), use_cache=False)
    counted = meter.counts.flops
    assert costs.blocks == tuple(counted[name] for name, _ in unit_modules(model))
    assert costs.before == 0 and costs.after == counted["lm_head"]


def test_best_counts_the_experts_that_a_token_uses() -> None:
    half, all_ = (
        model_costs(meta("mixtral", num_experts_per_tok=k), "best", sequence=SEQUENCE) for k in (2, 4)
    )
    of_experts = 2 * SEQUENCE * 3 * 32 * 56  # of one expert
    assert all_.blocks[0] - half.blocks[0] == 2 * of_experts
    assert all_.after == half.after


def test_parameters_count_a_tied_weight_at_both_ends() -> None:
    model = meta("qwen2")
    costs = model_costs(model, "parameters")
    assert costs.before == 72 * 32 and costs.after == 72 * 32 + 32
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert sum(costs.blocks) + costs.before + costs.after == parameters + 72 * 32
    told = balance(model, costs, (0, 1, 3))
    assert told.parameters == (72 * 32 + costs.blocks[0], 2 * costs.blocks[0] + costs.after)
    assert told.costs == told.parameters and "layer 0 " in str(told)
    whole = {parameter: 2 * parameter.numel() for parameter in model.parameters()}
    assert balance(model, costs, (0, 1, 3), whole).parameters == tuple(2 * n for n in told.parameters)


def test_the_head_takes_blocks_from_the_last_stage() -> None:
    model = meta(num_hidden_layers=8, vocab_size=512)
    assert deal(model_costs(model, "uniform"), 2) == [0, 4, 8]
    assert deal(model_costs(model, "best", sequence=SEQUENCE), 2) == [0, 5, 8]
    assert deal(model_costs(model, "parameters"), 2) == [0, 4, 8]  # the embedding weighs as much as the head
    assert deal(model_costs(model, "uniform"), 8) == list(range(9))
    with pytest.raises(ConfigError, match="8 layers cannot be split into 9 stages"):
        deal(model_costs(model, "uniform"), 9)


def test_classes_by_regular_expression() -> None:
    model = meta()
    assert model_costs(model, "type:llamadecoder") == LayerCosts(0, (1, 1, 1), 0)
    assert model_costs(model, "type:DecoderLayer|embedding") == LayerCosts(1, (1, 1, 1), 0)
    with pytest.raises(ConfigError, match=r'"type:gpt" matches no layer(?s:.)*LlamaDecoderLayer'):
        model_costs(model, "type:gpt")


def test_what_was_measured_is_taken() -> None:
    model, measured = meta(), LayerCosts(0.5, (1.0, 3.0, 1.0), 0.25)
    assert model_costs(model, "profile", measured=measured) is measured
    assert deal(measured, 2) == [0, 1, 3]
    for wrong in (None, LayerCosts(0, (1.0,), 0)):
        with pytest.raises(ConfigError, match="needs the measured seconds of 3 blocks"):
            model_costs(model, "profile", measured=wrong)


def test_what_cannot_be_dealt_out() -> None:
    with pytest.raises(ConfigError, match="Linear cannot be split into pipeline stages: it has no list"):
        model_costs(nn.Linear(2, 2), "uniform")
    with pytest.raises(ConfigError, match="unknown partition method 'bset'"):
        model_costs(meta(), "bset")


def test_split_layers_are_counted_as_they_are() -> None:
    """On 2 tensor-parallel ranks a block costs half, except for the attention scores, which shapes do not show."""
    model = meta()
    whole, half = (model_costs(model, "best", sequence=SEQUENCE, tp=tp).blocks[0] for tp in (1, 2))
    assert whole - half == 2 * SEQUENCE * SEQUENCE * 32


def test_an_auxiliary_loss_of_all_routers_is_refused() -> None:
    model = meta()
    model.config.output_router_logits = True
    with pytest.raises(ConfigError, match="auxiliary loss of the routers"):
        model_costs(model, "uniform")
