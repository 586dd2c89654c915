import inspect

import pytest
import torch

from launcher.config import ConfigProblems, OptimizerConfig, load
from launcher.config.optimizer import NOT_ON_SHARDS, TYPES

DEEPSPEED_ONLY = {"adam_w_mode", "torch_adam", "bias_correction"}


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
    assert set(TYPES) | set(NOT_ON_SHARDS) == set(classes)
    for name, kind in TYPES.items():
        signature = dict(inspect.signature(classes[name]).parameters)
        del signature["params"]
        if name == "Adam":
            del signature["decoupled_weight_decay"]  # adam_w_mode says it here
        assert set(kind.keywords) - DEEPSPEED_ONLY == set(signature), name
        assert kind.lr == signature["lr"].default, name


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


def test_adam_that_is_adamw_is_told() -> None:
    config = load({"optimizer": {"type": "Adam", "params": {"weight_decay": 0.1}}})
    assert any("decays weights as AdamW" in str(note) for note in config.notes)
    quiet = load({"optimizer": {"type": "Adam", "params": {"weight_decay": 0.1, "adam_w_mode": False}}})
    assert not any("AdamW" in str(note) for note in quiet.notes)


def test_keywords_of_torch_are_kept() -> None:
    params = built("SGD", lr=0.1, momentum=0.9, nesterov=True).params
    assert params.given() == {"lr": 0.1, "momentum": 0.9, "nesterov": True}
    assert built("Rprop", step_sizes=[1e-6, 50]).params.step_sizes == (1e-6, 50.0)


@pytest.mark.parametrize(
    ("kind", "params", "words"),
    [
        ("AdamV", {}, 'there is no optimizer the text "AdamV"'),
        ("Adem", {}, 'did you mean "Adam"?'),
        ("Lion", {}, "DeepSpeed's Lion is not implemented here yet"),
        ("Lamb", {}, "DeepSpeed's Lamb is not implemented here yet"),
        ("Muon", {}, "Muon cannot step on sharded state yet"),
        ("lbfgs", {}, "LBFGS cannot step on sharded state yet"),
        (7, {}, "optimizer.type: must be a text in quotes, not 7"),
        ("AdamW", {"momentum": 0.9}, "AdamW has no such keyword; it is one of SGD, RMSprop"),
        ("SGD", {"betas": [0.9, 0.99]}, "SGD has no such keyword"),
        ("AdamW", {"weight_decy": 0.1}, "did you mean `optimizer.params.weight_decay`?"),
        ("AdamW", {"betas": [0.9, 1.0]}, "each must be in [0, 1), not [0.9, 1.0]"),
        ("AdamW", {"betas": [0.9, "x"]}, 'optimizer.params.betas[1]: must be a number, not the text "x"'),
        ("AdamW", {"betas": [0.9, 0.9, 0.9]}, "optimizer.params.betas: must be a list of two numbers"),
        ("AdamW", {"lr": -1}, "must be at least 0"),
        ("AdamW", {"bias_correction": False}, "false is not implemented here yet"),
        ("AdamW", {"muon_lr": 10}, "not implemented here yet"),
    ],
)
def test_refusals(kind: object, params: dict[str, object], words: str) -> None:
    assert words in problem(kind, **params)
