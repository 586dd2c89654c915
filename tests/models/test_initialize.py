"""Initial values from (seed, name): correct distribution in any order, and models with the same results."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from launcher.errors import LauncherError
from launcher.models.build import build_on_meta
from launcher.models.initialize import initialize_module
from launcher.models.initialize_plan import plan_of
from tests.models.tiny import FAMILIES, config_of
from tests.models.truth import materialize


def _materialized(config: PretrainedConfig, seed: int = 5) -> PreTrainedModel:
    model = build_on_meta(config)
    materialize(model, seed)
    return model


def _fill(model: nn.Module) -> None:
    """Allocate memory with garbage in it, and keep ties."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in list(module._parameters.items()):
            if parameter is not None:
                garbage = torch.full(parameter.shape, float("nan"), dtype=parameter.dtype)
                setattr(module, key, made.setdefault(id(parameter), nn.Parameter(garbage)))
        for key, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[key] = torch.empty_like(buffer, device="cpu").fill_(1)


@pytest.mark.parametrize("family", FAMILIES)
def test_computes_what_a_model_built_by_hf_computes(family: str) -> None:
    """Parameters are equal, so logits are equal only if every buffer (rotary frequencies, masks) is correct."""
    ours = _materialized(config_of(family)).eval()
    theirs = AutoModelForCausalLM.from_config(config_of(family)).eval()
    theirs.load_state_dict(ours.state_dict())
    tokens = torch.randint(0, 72, (2, 17))
    with torch.no_grad():
        assert torch.equal(ours(tokens).logits, theirs(tokens).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_distribution_is_that_of_hf(family: str) -> None:
    """Every parameter has HF's mean and standard deviation: exact for constants, otherwise within chance."""
    ours = _materialized(config_of(family))
    theirs = AutoModelForCausalLM.from_config(config_of(family))
    assert not any(p.is_meta for p in ours.parameters())
    for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        if b.std() == 0 or b.numel() < 2:
            assert torch.equal(a, b), name
        elif b.numel() >= 500:
            assert a.std().item() == pytest.approx(b.std().item(), rel=0.2), name
            assert abs(a.mean() - b.mean()).item() < 6 * b.std().item() / b.numel() ** 0.5, name


def test_gpt2_projections_into_the_residual_stream_are_as_transformers_scales_them() -> None:
    """They are plain Conv1D modules; the attention's `_init_weights` scales them.

    Some versions of transformers have none.
    """
    config = config_of("gpt2", n_embd=96, n_layer=8)
    ours, theirs = _materialized(config), AutoModelForCausalLM.from_config(config)
    for name in ("attn.c_attn", "attn.c_proj", "mlp.c_proj"):
        mine, wanted = (model.transformer.h[3].get_submodule(name).weight for model in (ours, theirs))
        assert mine.std().item() == pytest.approx(wanted.std().item(), rel=0.06), name


def test_t5_shared_embedding_gets_the_roots_scale() -> None:
    with torch.device("meta"):
        model = T5ForConditionalGeneration(T5Config(d_model=32, d_ff=32, num_layers=1, vocab_size=256))
    materialize(model, 1)
    assert model.shared.weight.std().item() == pytest.approx(1.0, rel=0.05)
    assert model.lm_head.weight is model.shared.weight
    assert model.encoder.embed_tokens.weight is model.shared.weight


@pytest.mark.parametrize("family", ["gpt2", "qwen2", "mamba"])
@pytest.mark.parametrize("shuffle", [lambda x: x[::-1], lambda x: random.Random(1).sample(x, len(x))])
def test_order_and_neighbours_do_not_matter(
    family: str, shuffle: Callable[[list[tuple[str, nn.Module]]], list[tuple[str, nn.Module]]]
) -> None:
    truth = _materialized(config_of(family)).state_dict()
    model = build_on_meta(config_of(family))
    _fill(model)
    for name, module in shuffle(list(model.named_modules())):
        initialize_module(model, name, module, 5)
    for name, value in model.state_dict().items():
        assert torch.equal(value, truth[name]), name


def test_only_the_module_itself_needs_memory() -> None:
    """One module is materialized and freed again while the rest stays on meta, as in a sharded start."""
    truth = _materialized(config_of("gpt2")).state_dict()
    model = build_on_meta(config_of("gpt2"))
    plan_of(model)
    module = model.transformer.h[1].attn.c_proj
    for key, parameter in list(module.named_parameters(recurse=False)):
        setattr(module, key, nn.Parameter(torch.empty_like(parameter, device="cpu")))
    initialize_module(model, "transformer.h.1.attn.c_proj", module, 5)
    assert torch.equal(module.weight, truth["transformer.h.1.attn.c_proj.weight"])
    assert sum(not p.is_meta for p in model.parameters()) == 2


def test_seed_and_name_change_the_values_and_nothing_else_does() -> None:
    first, again, other = (_materialized(config_of("llama"), seed) for seed in (1, 1, 2))
    layer, same, reseeded = (m.model.layers[0].mlp.up_proj.weight for m in (first, again, other))
    assert torch.equal(layer, same)
    assert not torch.equal(layer, reseeded)
    assert not torch.equal(layer, first.model.layers[1].mlp.up_proj.weight)


def test_random_state_of_the_caller_is_untouched() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    _materialized(config_of("gpt2"))
    assert torch.equal(torch.rand(4), expected)


def test_the_other_name_of_a_tied_weight_changes_nothing() -> None:
    model = _materialized(config_of("gpt2"))
    before = model.transformer.wte.weight.clone()
    initialize_module(model, "lm_head", model.lm_head, 5)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert torch.equal(model.transformer.wte.weight, before)


def test_tensors_marked_as_initialised_are_kept() -> None:
    model = build_on_meta(config_of("llama"))
    plan_of(model)
    norm = model.model.norm
    norm.weight = nn.Parameter(torch.full((32,), 3.0))
    norm.weight._is_hf_initialized = True
    initialize_module(model, "model.norm", norm, 1)
    assert torch.equal(norm.weight, torch.full((32,), 3.0))


def test_bfloat16() -> None:
    model = build_on_meta(config_of("llama"), torch.bfloat16)
    materialize(model, 1)
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert model.model.layers[0].mlp.up_proj.weight.float().std().item() == pytest.approx(0.02, rel=0.1)
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


class _Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.lstm = nn.LSTM(32, 32)
        self.attention = nn.MultiheadAttention(32, 4)
        self.norm = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, 64)


def test_plain_torch_modules_start_as_torch_starts_them() -> None:
    with torch.device("meta"):
        model = _Plain()
    materialize(model, 1)
    reference = _Plain()
    assert model.embed.weight.std().item() == pytest.approx(1.0, rel=0.1)
    bound = 32**-0.5
    assert 0.9 * bound < model.head.weight.abs().max().item() <= bound
    assert 0.9 * bound < model.lstm.weight_hh_l0.abs().max().item() <= bound
    assert model.attention.in_proj_weight.std().item() == pytest.approx(
        reference.attention.in_proj_weight.std().item(), rel=0.1
    )
    assert torch.equal(model.attention.out_proj.bias, torch.zeros(32))
    assert torch.equal(model.norm.running_var, torch.ones(32)) and model.norm.num_batches_tracked == 0
    out, _ = model.lstm(model.embed(torch.arange(5)))
    assert torch.isfinite(model.head(out)).all()


class _Silent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


def test_parameter_that_nobody_initialises_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), _Silent()).to("meta")
    with pytest.raises(LauncherError, match="scale") as caught:
        materialize(model, 1)
    assert "1 (_Silent)" in str(caught.value)


def test_still_on_meta_is_an_error() -> None:
    model = build_on_meta(config_of("llama"))
    with pytest.raises(LauncherError, match="meta device and cannot be initialised"):
        initialize_module(model, "model.norm", model.model.norm, 1)
