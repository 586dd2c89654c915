"""A table of every optimizer type, without importing torch: its keywords, defaults and other names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

_COMMON = ("lr", "weight_decay", "foreach", "maximize", "differentiable")
_ADAM = (*_COMMON, "betas", "eps", "amsgrad", "capturable", "fused")
_SWITCHES = ("torch_adam", "adam_w_mode", "bias_correction", "set_grad_none", "fp32_optimizer_states")
"""DeepSpeed's own keywords of Adam, which torch's classes do not take."""
_EIGHT_BIT = ("lr", "betas", "eps", "weight_decay", "min_8bit_size")


class OptimizerType(NamedTuple):
    """One optimizer type.

    Attributes:
        lr: learning rate when none is written.
        keywords: keys that its params take.
        defaults: values of other keys when they are not written, where they are not the class's own.
        package: what has to be installed for it; None: it is torch's or ours.
    """

    lr: float
    keywords: tuple[str, ...]
    defaults: Mapping[str, Any] = {}
    package: str | None = None


_MOMENTS = {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}

TORCH: dict[str, OptimizerType] = {
    "Adam": OptimizerType(1e-3, (*_ADAM, *_SWITCHES), _MOMENTS),
    "AdamW": OptimizerType(1e-3, (*_ADAM, *_SWITCHES), _MOMENTS),
    "SGD": OptimizerType(1e-3, (*_COMMON, "momentum", "dampening", "nesterov", "fused")),
    "Adagrad": OptimizerType(
        1e-2, (*_COMMON, "lr_decay", "initial_accumulator_value", "eps", "fused", "fp32_optimizer_states")
    ),
    "Adadelta": OptimizerType(1.0, (*_COMMON, "rho", "eps", "capturable")),
    "Adamax": OptimizerType(2e-3, (*_COMMON, "betas", "eps", "capturable")),
    "ASGD": OptimizerType(1e-2, (*_COMMON, "lambd", "alpha", "t0", "capturable")),
    "NAdam": OptimizerType(
        2e-3, (*_COMMON, "betas", "eps", "momentum_decay", "decoupled_weight_decay", "capturable")
    ),
    "RAdam": OptimizerType(1e-3, (*_COMMON, "betas", "eps", "decoupled_weight_decay", "capturable")),
    "RMSprop": OptimizerType(1e-2, (*_COMMON, "alpha", "eps", "momentum", "centered", "capturable")),
    "Rprop": OptimizerType(
        1e-2, ("lr", "etas", "step_sizes", "capturable", "foreach", "maximize", "differentiable")
    ),
}
"""Classes of torch.optim that step element by element, by their names there."""

OWN: dict[str, OptimizerType] = {
    "Lion": OptimizerType(
        1e-3,
        ("lr", "betas", "weight_decay", "set_grad_none", "fp32_optimizer_states"),
        {"betas": [0.9, 0.999], "weight_decay": 0.0},
    ),
    "Lamb": OptimizerType(
        1e-3,
        ("lr", "betas", "eps", "weight_decay", "bias_correction", "max_coeff", "min_coeff", "eps_inside_sqrt"),
        {**_MOMENTS, "max_coeff": 10.0, "min_coeff": 0.01},
    ),
    "Muon": OptimizerType(
        0.02,
        ("lr", "muon_lr", "adam_lr", "momentum", "ns_method", "betas", "eps", "weight_decay", "adam_w_mode",
         "torch_adam", "foreach", "fp32_optimizer_states"),
        {"momentum": 0.95, "ns_method": "gram", "betas": [0.9, 0.95], "eps": 1e-10, "weight_decay": 0.0},
    ),
}  # fmt: skip
"""Types that are ours, with DeepSpeed's keywords and defaults."""

MUON_ADAM_LR = 3e-4
"""Muon: learning rate of Adam's share when neither `lr` nor `adam_lr` is written."""

FROM_PACKAGES: dict[str, OptimizerType] = {
    "Adam8bit": OptimizerType(1e-3, _EIGHT_BIT, {}, "bitsandbytes"),
    "AdamW8bit": OptimizerType(1e-3, _EIGHT_BIT, {}, "bitsandbytes"),
    "PagedAdamW8bit": OptimizerType(1e-3, _EIGHT_BIT, {}, "bitsandbytes"),
    "Lion8bit": OptimizerType(1e-4, ("lr", "betas", "weight_decay", "min_8bit_size"), {}, "bitsandbytes"),
    "MuAdam": OptimizerType(1e-3, _ADAM, {}, "mup"),
    "MuAdamW": OptimizerType(1e-3, _ADAM, {}, "mup"),
    "MuSGD": OptimizerType(1e-3, (*_COMMON, "momentum", "dampening", "nesterov", "fused"), {}, "mup"),
}
"""Types of other packages: bitsandbytes' 8-bit states, and mup's rates by width."""

TYPES: dict[str, OptimizerType] = {**TORCH, **OWN, **FROM_PACKAGES}
"""Types that can be used."""

NOT_ON_SHARDS: dict[str, str] = {
    "LBFGS": "evaluates the loss several times within a step",
    "SparseAdam": "needs sparse gradients, and gradients are flat buffers here",
    "Adafactor": "keeps row and column means of whole matrices, which are not cut as parameters are",
}
"""torch.optim classes that cannot step here -> why."""

REMOVED: frozenset[str] = frozenset({"OneBitAdam", "OneBitLamb", "ZeroOneAdam"})
"""Types that DeepSpeed itself dropped in 0.19.8."""

MEANT: dict[str, str] = {
    **dict.fromkeys(("FusedAdam", "DeepSpeedCPUAdam", "CPUAdam", "cpu_adam", "ZenFlowCPUAdam"), "Adam"),
    **dict.fromkeys(
        ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "FusedAdamW", "adam_w"), "AdamW"
    ),
    **dict.fromkeys(("DeepSpeedCPUAdagrad", "CPUAdagrad"), "Adagrad"),
    **dict.fromkeys(("FusedLion", "DeepSpeedCPULion", "CPULion", "lion_32bit"), "Lion"),
    "FusedLamb": "Lamb",
    "MuonWithAuxAdam": "Muon",
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit"), "AdamW8bit"),
    "paged_adamw_8bit": "PagedAdamW8bit",
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit"), "Lion8bit"),
}
"""Names of classes, and of the Hugging Face Trainer's `optim`, that people write as a type -> the type they mean."""


def canonical(name: Any) -> str | None:
    """Return the optimizer's name in its own spelling, whatever case it was written in; None if there is none."""
    spellings = {known.lower(): known for known in (*TYPES, *NOT_ON_SHARDS, *REMOVED)}
    return spellings.get(name.lower()) if isinstance(name, str) else None


def meant(name: str) -> str | None:
    """Return the type that somebody means who writes the name of a class or of another program."""
    return {other.lower(): kind for other, kind in MEANT.items()}.get(name.lower())
