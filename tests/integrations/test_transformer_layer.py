"""`DeepSpeedTransformerLayer` is a BERT layer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertLayer

from launcher.errors import ArgumentsError
from launcher.integrations.stand_ins import initialize
from launcher.integrations.transformer_layer import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer
from tests.engine.driving import config_of
from tests.pool import RankContext, WorkerPool

SIZES = {"hidden_size": 8, "heads": 2, "num_hidden_layers": 4, "initializer_range": 0.5}


def layer(**more: bool) -> DeepSpeedTransformerLayer:
    torch.manual_seed(3)
    return DeepSpeedTransformerLayer(DeepSpeedTransformerConfig(**SIZES, **more))  # type: ignore[arg-type]


def parts(bert: BertLayer, name: str) -> list[Tensor]:
    own = bert.attention.self
    modules = (own.query, own.key, own.value, bert.attention.output.dense, bert.attention.output.LayerNorm)
    more = (bert.intermediate.dense, bert.output.dense, bert.output.LayerNorm)
    return [getattr(module, name) for module in (*modules, *more)]


def test_it_is_that_of_transformers() -> None:
    torch.manual_seed(1)
    bert = BertLayer(
        BertConfig(
            hidden_size=8,
            num_attention_heads=2,
            intermediate_size=32,
            hidden_act="gelu_pytorch_tanh",
            attn_implementation="eager",
        )
    ).eval()
    for parameter in bert.parameters():
        nn.init.normal_(parameter)
    config = DeepSpeedTransformerConfig(hidden_size=8, heads=2, pre_layer_norm=False)
    ours = DeepSpeedTransformerLayer(config, parts(bert, "weight"), parts(bert, "bias"))
    x = torch.randn(2, 5, 8)
    mask = torch.zeros(2, 1, 1, 5)
    mask[1, ..., 3:] = -10000.0
    want = bert(x, mask)
    want = want[0] if isinstance(want, tuple) else want
    torch.testing.assert_close(ours(x, mask), want)
    torch.testing.assert_close(ours(x, mask == 0), want)
    with pytest.raises(ArgumentsError, match="the mask has dtype torch"):
        ours(x, torch.ones(2, 5, dtype=torch.int64))


def test_norms_come_first_and_new_weights_are_small_where_a_layer_adds() -> None:
    one = layer()
    x = torch.randn(1, 3, 8)
    with torch.no_grad():
        one.attn_ow.zero_()
        inner = functional.layer_norm(x, (8,), eps=1e-12) @ one.inter_w.T
        want = x + functional.gelu(inner, approximate="tanh") @ one.output_w.T
    torch.testing.assert_close(one(x), want)
    fresh = layer()
    assert fresh.output_w.std() < fresh.inter_w.std() / 2  # by sqrt(8)
    assert one.config.layer_id + 1 == fresh.config.layer_id
    assert isinstance(layer(return_tuple=True)(x), tuple)


def test_a_config_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for encoding in "utf-8", "utf-16":
        path.write_text(json.dumps({"hidden_size": 16, "own": 1}), encoding=encoding)
        config = DeepSpeedTransformerConfig.from_json_file(path)
        assert config.hidden_size == 16 and config.intermediate_size == 64 and config.own == 1  # type: ignore[attr-defined]


def losses(ctx: RankContext, stage: int) -> list[float]:
    model = nn.Sequential(layer(), layer(), nn.Linear(8, 1))
    engine = initialize(model=model, config=config_of(stage))[0]
    torch.manual_seed(ctx.rank)
    found = []
    for _ in range(3):
        loss = engine(torch.randn(2, 4, 8)).square().mean()
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    engine.destroy()
    return found


def test_it_trains_in_shards(pool: WorkerPool) -> None:
    for sharded, whole in zip(pool.run(losses, 2, 3), pool.run(losses, 2, 0), strict=True):
        assert sharded == pytest.approx(whole, rel=1e-5)
