import inspect

import pytest
import torch

from launcher.config import ConfigProblems, OptimizerConfig, load
from launcher.config.optimizer import MEANT, NOT_ON_SHARDS, OWN, TORCH, TYPES

DEEPSPEED_ONLY = {"adam_w_mode", "torch_adam", "bias_correction", "set_grad_none", "fp32_optimizer_states"}


def built(kind: str, **params: object) -> OptimizerConfig:
    optimizer = load({"optimizer": {"type": kind, "params": params}}).optimizer
    assert optimizer is not None
    return optimizer


def problem(kind: object, **params: object) -> str:
    with pytest.raises(ConfigProblems) as caught:
        load({"optimizer": {"type": kind, "params": params}})
    return str(caught.value)


def test_the_table_is_torchs() -> None:
    classes = {
        name: cls
        for name, cls in vars(torch.optim).items()
        if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and name != "Optimizer"
    }
    assert set(TORCH) | set(NOT_ON_SHARDS) | {"Muon"} == set(classes)
    for name, kind in TORCH.items():
        signature = dict(inspect.signature(classes[name]).parameters)
        del signature["params"]
        if name == "Adam":
            del signature["decoupled_weight_decay"]  # adam_w_mode says it here
        assert set(kind.keywords) - DEEPSPEED_ONLY == set(signature), name
        assert kind.lr == signature["lr"].default, name


def test_own_types_have_deepspeeds_defaults() -> None:
    moments = {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
    lion = {"lr": 1e-3, "betas": [0.9, 0.999], "weight_decay": 0.0}
    assert written("Lion") == lion
    bounds = {"max_coeff": 10.0, "min_coeff": 0.01, "eps_inside_sqrt": False}
    assert written("Lamb") == {"lr": 1e-3, **moments, "bias_correction": True, **bounds}
    muon = {"momentum": 0.95, "ns_method": "gram", "betas": [0.9, 0.95], "eps": 1e-10, "weight_decay": 0.0}
    assert written("Muon") == {"lr": 0.02, "adam_lr": 3e-4, **muon}
    assert written("Muon", lr=0.1) == {"lr": 0.1, **muon}
    assert all(kind.lr == built(name).params.lr for name, kind in OWN.items())


def written(kind: str, **params: object) -> dict[str, object]:
    """Return the params that are numbers or differ from the key's default."""
    everything = built(kind, **params).to_dict()["params"]
    switches = {"set_grad_none", "fp32_optimizer_states", "torch_adam", "adam_w_mode"}
    return {key: value for key, value in everything.items() if key not in switches}


@pytest.mark.parametrize("name", MEANT)
def test_names_of_classes_are_answered_with_the_type(name: str) -> None:
    assert f'did you mean "{MEANT[name]}"?' in problem(name)
    assert f'did you mean "{MEANT[name]}"?' in problem(name.upper())


@pytest.mark.key("optimizer.params.set_grad_none", "optimizer.legacy_fusion")
def test_keys_without_effect_are_told() -> None:
    params = {"set_grad_none": False}
    config = load({"optimizer": {"type": "AdamW", "params": params, "legacy_fusion": True}})
    notes = [str(note) for note in config.notes if note.kind == "no effect"]
    assert (
        len(notes) == 2 and "legacy_fusion" in notes[0] + notes[1] and "set_grad_none" in notes[0] + notes[1]
    )


@pytest.mark.parametrize("kind", sorted(TYPES))
def test_names_in_any_case(kind: str) -> None:
    assert built(kind.lower()).type == kind
    assert built(kind.upper()).params.lr == TYPES[kind].lr


def test_adam_has_deepspeeds_defaults() -> None:
    for kind in ("Adam", "AdamW"):
        params = built(kind).params
        assert (params.lr, params.betas, params.eps, params.weight_decay) == (1e-3, (0.9, 0.999), 1e-8, 0.0)
        assert params.adam_w_mode is True
    assert built("AdamW", torch_adam=True).params.weight_decay == 0.01
    assert built("Adam", torch_adam=True, adam_w_mode=False).params.weight_decay == 0.0
    assert built("AdamW", torch_adam=True, weight_decay=0.3).params.weight_decay == 0.3
    assert built("Adam", betas=None, weight_decay=None).params == built("Adam").params
    assert built("SGD").params.weight_decay is None


def test_what_eight_bit_types_cannot_do_is_told() -> None:
    config = load({"optimizer": {"type": "AdamW8bit"}})
    assert any("cannot be saved" in str(note) for note in config.notes)


def test_adam_that_is_adamw_is_told() -> None:
    config = load({"optimizer": {"type": "Adam", "params": {"weight_decay": 0.1}}})
    assert any("decays weights as AdamW" in str(note) for note in config.notes)
    quiet = load({"optimizer": {"type": "Adam", "params": {"weight_decay": 0.1, "adam_w_mode": False}}})
    assert not any("AdamW" in str(note) for note in quiet.notes)


def test_keywords_of_torch_are_kept() -> None:
    params = built("SGD", lr=0.1, momentum=0.9, nesterov=True).params
    assert params.given() == {"lr": 0.1, "momentum": 0.9, "nesterov": True}
    assert built("Rprop", step_sizes=[1e-6, 50]).params.step_sizes == (1e-6, 50.0)


@pytest.mark.key("optimizer.type", "optimizer.params.max_grad_norm")
@pytest.mark.parametrize(
    ("kind", "params", "words"),
    [
        ("AdamV", {}, 'unknown optimizer type "AdamV"'),
        ("Adem", {}, 'did you mean "Adam"?'),
        ("Adafactor", {}, "Adafactor does not support sharded state: it keeps row and column means"),
        ("lbfgs", {}, "LBFGS does not support sharded state: it evaluates the loss several times"),
        ("SparseAdam", {}, "SparseAdam does not support sharded state: it needs sparse gradients"),
        (7, {}, "optimizer.type: must be a quoted string, not 7"),
        ("AdamW", {"momentum": 0.9}, "AdamW does not have this keyword; it belongs to SGD, RMSprop, Muon"),
        ("SGD", {"betas": [0.9, 0.99]}, "SGD does not have this keyword"),
        ("AdamW", {"weight_decy": 0.1}, "did you mean `optimizer.params.weight_decay`?"),
        ("AdamW", {"betas": [0.9, 1.0]}, "each must be in [0, 1), not [0.9, 1.0]"),
        ("AdamW", {"betas": [0.9, "x"]}, 'optimizer.params.betas[1]: must be a number, not the string "x"'),
        ("AdamW", {"betas": [0.9, 0.9, 0.9]}, "optimizer.params.betas: must be a list of two numbers"),
        ("AdamW", {"lr": -1}, "must be at least 0"),
        ("SGD", {"bias_correction": False}, "SGD does not have this keyword"),
        ("AdamW", {"max_coeff": 5}, "AdamW does not have this keyword; it belongs to Lamb"),
        ("Lamb", {"max_coeff": 0.1, "min_coeff": 0.2}, "0.2 is more than max_coeff, 0.1"),
        ("Muon", {"ns_method": "svd"}, "optimizer.params.ns_method: must be"),
        ("Muon", {"per_head_muon": True}, "not implemented here yet"),
        ("Lion", {"eps": 1e-8}, "Lion does not have this keyword"),
        ("AdamW", {"muon_lr": 10}, "AdamW does not have this keyword; it belongs to Muon"),
    ],
)
def test_refusals(kind: object, params: dict[str, object], words: str) -> None:
    assert words in problem(kind, **params)
