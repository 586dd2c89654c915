"""The zoo has every causal-LM type of transformers, and its models train."""

from __future__ import annotations

import pytest
import torch
import transformers
from packaging.version import Version
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.tensor.zoo import CAUSAL_TYPES, batch_of, tiny_config, tiny_model
from tests.tensor.zoo_tables import EXTRAS, KNOWN, KNOWN_AT, PART, ROUTES, UNRUNNABLE


def test_every_causal_type_is_known() -> None:
    """Types newer than the version of the list may be missing."""
    there = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if Version(transformers.__version__) <= Version(KNOWN_AT):
        assert there <= set(KNOWN)
    if Version(transformers.__version__) >= Version(KNOWN_AT):
        assert set(KNOWN) <= there
    assert set(CAUSAL_TYPES) | set(UNRUNNABLE) == set(KNOWN) & there | set(UNRUNNABLE)
    assert len(CAUSAL_TYPES) == len(set(CAUSAL_TYPES))


def test_tables_name_known_types_once() -> None:
    routes = " ".join(ROUTES.values()).split()
    assert len(routes) == len(set(routes))
    assert {*UNRUNNABLE, *PART, *routes, *" ".join(EXTRAS.values()).split()} <= set(KNOWN)


# a plain one, a Conv1D one, experts in layers of several kinds, latent attention, a decoder with cross attention
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "jamba", "deepseek_v3", "mbart"])
def test_models_train_and_repeat(model_type: str) -> None:
    if model_type not in CAUSAL_TYPES:
        pytest.skip(f"this transformers has no {model_type}")
    losses = []
    for _ in range(2):
        model = tiny_model(model_type, seed=3)
        loss = model(**batch_of(model_type, seed=4)).loss
        loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.min() < parameter.max(), f"{name} is constant"
            assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        losses.append([loss, *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))
    assert 2 < losses[0][0] < 8  # about log(71)
    assert not torch.equal(tiny_model(model_type, seed=5).get_input_embeddings().weight, losses[0][1])


def test_changes_reach_the_config() -> None:
    assert tiny_config("llama").num_hidden_layers == 2
    assert (
        tiny_config("llama", num_hidden_layers=3, vocab_size=99).to_dict().items()
        >= {
            "num_hidden_layers": 3,
            "vocab_size": 99,
        }.items()
    )
