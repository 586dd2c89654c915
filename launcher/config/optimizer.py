"""`optimizer`: its type and keywords, and what is known of each type without importing torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import AfterValidator, Field, field_validator

from launcher.config.problems import in_json, nearest
from launcher.config.section import Pair, Section, complaint

_COMMON = ("lr", "weight_decay", "foreach", "maximize", "differentiable")
_ADAM = (*_COMMON, "betas", "eps", "amsgrad", "capturable", "fused")
_SWITCHES = ("torch_adam", "adam_w_mode", "bias_correction", "set_grad_none", "fp32_optimizer_states")
"""DeepSpeed's own keywords of Adam, which torch's classes do not accept."""
_EIGHT_BIT = ("lr", "betas", "eps", "weight_decay", "min_8bit_size")


class OptimizerType(NamedTuple):
    """One optimizer type.

    Attributes:
        lr: learning rate if none is set.
        keywords: keys that its params accept.
        defaults: defaults of other keys, if they differ from those of the class.
        package: package that must be installed; None for torch's and our own types.
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
"""Elementwise optimizers of torch.optim, by class name."""

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
"""Our own types, with DeepSpeed's keywords and defaults."""

MUON_ADAM_LR = 3e-4
"""Muon: learning rate of the parameters that Adam steps, if neither `lr` nor `adam_lr` is set."""

FROM_PACKAGES: dict[str, OptimizerType] = {
    "Adam8bit": OptimizerType(1e-3, _EIGHT_BIT, {}, "bitsandbytes"),
    "AdamW8bit": OptimizerType(1e-3, _EIGHT_BIT, {}, "bitsandbytes"),
    "PagedAdamW8bit": OptimizerType(1e-3, _EIGHT_BIT, {}, "bitsandbytes"),
    "Lion8bit": OptimizerType(1e-4, ("lr", "betas", "weight_decay", "min_8bit_size"), {}, "bitsandbytes"),
    "MuAdam": OptimizerType(1e-3, _ADAM, {}, "mup"),
    "MuAdamW": OptimizerType(1e-3, _ADAM, {}, "mup"),
    "MuSGD": OptimizerType(1e-3, (*_COMMON, "momentum", "dampening", "nesterov", "fused"), {}, "mup"),
}
"""Types of other packages: bitsandbytes' 8-bit optimizers, and mup's with width-dependent learning rates."""

TYPES: dict[str, OptimizerType] = {**TORCH, **OWN, **FROM_PACKAGES}
"""All supported types."""

NOT_ON_SHARDS: dict[str, str] = {
    "LBFGS": "evaluates the loss several times within a step",
    "SparseAdam": "needs sparse gradients, but gradients are dense flat buffers here",
    "Adafactor": "keeps row and column means of whole matrices, which are not sharded like parameters",
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
"""Class names, and names of the Hugging Face Trainer's `optim`, that users write as a type -> the type."""


def canonical(name: Any) -> str | None:
    """Return an optimizer's name in its canonical case; None if there is no such optimizer."""
    spellings = {known.lower(): known for known in (*TYPES, *NOT_ON_SHARDS, *REMOVED)}
    return spellings.get(name.lower()) if isinstance(name, str) else None


def meant(name: str) -> str | None:
    """Return the type that corresponds to a class name or to a name of another program."""
    return {other.lower(): kind for other, kind in MEANT.items()}.get(name.lower())


def _decays(betas: tuple[float, float]) -> tuple[float, float]:
    if not all(0 <= beta < 1 for beta in betas):
        raise complaint(f"each must be in [0, 1), not {list(betas)}", "write [0.9, 0.999]")
    return betas


class OptimizerParams(Section):
    """Keywords of the optimizer. None means not set: the default of the class applies."""

    without_effect: ClassVar[dict[str, str]] = {
        "set_grad_none": "gradients are flat buffers that the next backward overwrites; there is nothing to set",
    }
    differs: ClassVar[dict[str, str]] = {
        "amsgrad": "DeepSpeed's own Adam rejects true; here it is torch's AMSGrad",
        "torch_adam": "Adam is always torch's here; the key only changes AdamW's default weight decay to torch's 0.01",
        "fp32_optimizer_states": "applies on every device, not only to the CPU Adam of offload; moments are never "
        "float16, in which an eps of 1e-8 is 0",
        "max_coeff": "the trust ratio is computed over the whole parameter at every stage; under ZeRO, DeepSpeed's "
        "Lamb uses the norms of a rank's flat partition",
        "ns_method": "gradients are clipped before the momentum, as in plain PyTorch, while DeepSpeed's "
        "ZeRO clips the orthogonalized update; on CPUs the iteration runs in float32",
    }

    lr: Annotated[float, Field(ge=0)] = 1e-3
    """Learning rate. Muon: of the matrices and of the parameters that Adam steps; 0.02 and 3e-4 if not
    set."""

    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Weight decay. If not set: 0 for Adam and AdamW, as in DeepSpeed; 0.01 for AdamW with torch_adam."""

    betas: Annotated[Pair, AfterValidator(_decays)] | None = None
    """Adam family: decay of the first and second moment, each in [0, 1)."""

    eps: Annotated[float, Field(ge=0)] | None = None
    """Added to the denominator."""

    adam_w_mode: bool = True
    """Adam: decoupled weight decay, as in AdamW. False: L2 weight decay. AdamW is always decoupled."""

    torch_adam: bool = False
    """DeepSpeed: use torch's class instead of its fused one. Here torch's class is always used."""

    bias_correction: bool = True
    """Adam, Lamb: correct the bias of the moments, which start at zero."""

    set_grad_none: bool = True
    """DeepSpeed's fused Adam and Lion: whether clearing a gradient frees it."""

    fp32_optimizer_states: bool = True
    """Adam, Adagrad, Lion, Muon: float32 moments. False: bfloat16 moments if the master weights are bfloat16
    (bf16.bf16_master_weights_and_grads), the same as bf16.bf16_optimizer_states."""

    amsgrad: bool | None = None
    """Adam family: use the largest second moment so far (Reddi et al. 2018)."""

    momentum: Annotated[float, Field(ge=0)] | None = None
    """SGD, RMSprop: momentum. Muon: decay of its Nesterov momentum, 0.95 if not set, as in DeepSpeed."""

    muon_lr: Annotated[float, Field(ge=0)] | None = None
    """Muon: learning rate of the matrices. Null: `lr`."""

    adam_lr: Annotated[float, Field(ge=0)] | None = None
    """Muon: learning rate of all other parameters, which AdamW steps. Null: `lr`."""

    ns_method: Literal["gram", "standard"] | None = None
    """Muon: run the five Newton-Schulz steps on the small Gram matrix ("gram", less work for matrices that
    are not square; float16 on GPUs) or on the matrix itself ("standard"; bfloat16 on GPUs)."""

    max_coeff: Annotated[float, Field(gt=0)] | None = None
    """Lamb: upper bound of the trust ratio; 10 if not set."""

    min_coeff: Annotated[float, Field(ge=0)] | None = None
    """Lamb: lower bound of the trust ratio; 0.01 if not set."""

    eps_inside_sqrt: bool = False
    """Lamb: add eps inside the square root instead of outside."""

    min_8bit_size: Annotated[int, Field(ge=0)] | None = None
    """bitsandbytes: slices with fewer elements keep their moments in 32 bits."""

    dampening: float | None = None
    """SGD: dampening of momentum."""

    nesterov: bool | None = None
    """SGD: Nesterov momentum."""

    alpha: float | None = None
    """RMSprop: smoothing; ASGD: power of the step size."""

    centered: bool | None = None
    """RMSprop: normalize by an estimate of the variance."""

    rho: float | None = None
    """Adadelta: decay of squared gradients."""

    lr_decay: float | None = None
    """Adagrad: decay of the learning rate."""

    initial_accumulator_value: float | None = None
    """Adagrad: initial value of the accumulator."""

    lambd: float | None = None
    """ASGD: decay term."""

    t0: float | None = None
    """ASGD: step at which averaging starts."""

    momentum_decay: float | None = None
    """NAdam: decay of momentum."""

    decoupled_weight_decay: bool | None = None
    """NAdam, RAdam: weight decay as in AdamW."""

    etas: Pair | None = None
    """Rprop: factors of decrease and increase."""

    step_sizes: Pair | None = None
    """Rprop: smallest and largest step."""

    foreach: bool | None = None
    """torch: one kernel over many tensors. Null: torch chooses."""

    fused: bool | None = None
    """torch: one fused kernel. Not set or null: used if torch has one (Adam, AdamW, SGD, Adagrad)."""

    maximize: bool | None = None
    """torch: ascend instead of descend."""

    capturable: bool | None = None
    """torch: safe to capture in a CUDA graph."""

    differentiable: bool | None = None
    """torch: autograd through the step."""


class OptimizerConfig(Section):
    """The optimizer and its keywords."""

    without_effect: ClassVar[dict[str, str]] = {
        "legacy_fusion": "it chooses between two of DeepSpeed's fp16 wrappers, which compute the same",
    }
    type: str
    """Adam, AdamW, Lion, Lamb, Muon, Adagrad, SGD or another elementwise class of torch.optim; AdamW8bit and
    similar if bitsandbytes is installed, MuAdam, MuAdamW and MuSGD if mup is. Case-insensitive.
    Muon steps parameters of two or more dimensions whose names contain none of "embed", "lm_head" and "bias"
    (`use_muon` set on a parameter overrides this), and AdamW steps the others."""

    legacy_fusion: bool = False
    """DeepSpeed: use an old wrapper of its fused Adam in fp16."""

    params: OptimizerParams = Field(default_factory=OptimizerParams.model_construct)
    """Keywords of the optimizer."""

    @classmethod
    def defaults_of(cls, key: str, tree: Mapping[str, Any]) -> Mapping[str, Any]:
        kind = canonical(tree.get("type"))
        if key != "params" or kind is None or kind not in TYPES:
            return {}
        params = tree.get("params")
        written = params if isinstance(params, dict) else {}
        defaults = {"lr": TYPES[kind].lr, **TYPES[kind].defaults}
        decoupled = kind == "AdamW" or (kind == "Adam" and written.get("adam_w_mode", True))
        if decoupled and written.get("torch_adam") is True:
            defaults["weight_decay"] = 0.01  # the default of torch's AdamW
        if kind == "Muon" and written.get("lr") is None:
            defaults["adam_lr"] = MUON_ADAM_LR
        return defaults

    def to_dict(self) -> dict[str, Any]:
        keywords, params = TYPES[self.type].keywords, self.params.to_dict().items()
        kept = {key: value for key, value in params if key in keywords and value is not None}
        return {"type": self.type, "params": kept, "legacy_fusion": self.legacy_fusion}

    @field_validator("type")
    @classmethod
    def _known_type(cls, name: str) -> str:
        kind = canonical(name)
        if kind in TYPES:
            return str(kind)
        if kind in NOT_ON_SHARDS:
            raise complaint(f"{kind} does not support sharded state: it {NOT_ON_SHARDS[kind]}", "use AdamW")
        if kind in REMOVED:
            raise complaint(f"{kind} was removed from DeepSpeed itself", "use AdamW")
        near = meant(name) or nearest(name, TYPES)
        fix = f'did you mean "{near}"?' if near else f"use one of {', '.join(TYPES)}"
        raise complaint(f"unknown optimizer type {in_json(name)}", fix)
