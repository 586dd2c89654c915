"""`optimizer`: which one steps the shards, and its keywords."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, field_validator

from launcher.config.optimizer_types import MUON_ADAM_LR, NOT_ON_SHARDS, REMOVED, TYPES, canonical, meant
from launcher.config.problems import in_json, nearest
from launcher.config.section import Section
from launcher.config.values import Pair, complaint


def _decays(betas: tuple[float, float]) -> tuple[float, float]:
    if not all(0 <= beta < 1 for beta in betas):
        raise complaint(f"each must be in [0, 1), not {list(betas)}", "write [0.9, 0.999]")
    return betas


class OptimizerParams(Section):
    """Keywords of the optimizer. None means not written: the class's own default applies."""

    without_effect: ClassVar[dict[str, str]] = {
        "set_grad_none": "gradients are flat buffers that the next backward overwrites; there is nothing to set",
    }
    differs: ClassVar[dict[str, str]] = {
        "amsgrad": "DeepSpeed's own Adam refuses true; here it is torch's AMSGrad",
        "torch_adam": "Adam is always torch's here; the key only changes AdamW's default weight decay to torch's 0.01",
        "fp32_optimizer_states": "on every device, not only for the CPU Adam of offload; moments are never float16, "
        "in which an eps of 1e-8 is 0",
        "max_coeff": "the trust ratio is computed over the whole parameter at every stage; DeepSpeed's "
        "Lamb under ZeRO takes the "
        "norms of the flat partition of a rank",
        "ns_method": "gradients are clipped before the momentum, as in plain PyTorch, while DeepSpeed's "
        "ZeRO clips the orthogonalised update; on CPUs the iteration runs in float32",
    }

    lr: Annotated[float, Field(ge=0)] = 1e-3
    """Learning rate. Muon: for matrices and for the parameters of Adam; 0.02 and 3e-4 if left out."""

    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Weight decay; 0 for Adam and AdamW when left out, as in DeepSpeed; 0.01 for AdamW with torch_adam."""

    betas: Annotated[Pair, AfterValidator(_decays)] | None = None
    """Adam family: decay of the first and second moment, each in [0, 1)."""

    eps: Annotated[float, Field(ge=0)] | None = None
    """Added to a denominator."""

    adam_w_mode: bool = True
    """Adam: decoupled weight decay, that is AdamW; false: weight decay as L2. AdamW is always decoupled."""

    torch_adam: bool = False
    """DeepSpeed: torch's class instead of its fused one. Here it is always torch's."""

    bias_correction: bool = True
    """Adam, Lamb: correct the moments for their start at zero."""

    set_grad_none: bool = True
    """DeepSpeed's fused Adam and Lion: whether clearing a gradient frees it."""

    fp32_optimizer_states: bool = True
    """Adam, Adagrad, Lion, Muon: moments in float32; false: in bfloat16 where the master weights are bfloat16
    (bf16.bf16_master_weights_and_grads), the same as bf16.bf16_optimizer_states."""

    amsgrad: bool | None = None
    """Adam family: the largest second moment so far (Reddi et al. 2018)."""

    momentum: Annotated[float, Field(ge=0)] | None = None
    """SGD, RMSprop: momentum. Muon: decay of its momentum, 0.95 when left out; Nesterov's form, as in DeepSpeed."""

    muon_lr: Annotated[float, Field(ge=0)] | None = None
    """Muon: learning rate of matrices; null: `lr`."""

    adam_lr: Annotated[float, Field(ge=0)] | None = None
    """Muon: learning rate of everything else, which AdamW steps; null: `lr`."""

    ns_method: Literal["gram", "standard"] | None = None
    """Muon: the five Newton-Schulz steps on the small Gram matrix ("gram", less work for matrices that are not
    square; float16 on GPUs) or on the matrix itself ("standard"; bfloat16 on GPUs)."""

    max_coeff: Annotated[float, Field(gt=0)] | None = None
    """Lamb: upper bound of the trust ratio; 10 when left out."""

    min_coeff: Annotated[float, Field(ge=0)] | None = None
    """Lamb: lower bound of the trust ratio; 0.01 when left out."""

    eps_inside_sqrt: bool = False
    """Lamb: add eps under the root instead of to it."""

    min_8bit_size: Annotated[int, Field(ge=0)] | None = None
    """bitsandbytes: slices of fewer elements keep their moments in 32 bits."""

    dampening: float | None = None
    """SGD: dampening of momentum."""

    nesterov: bool | None = None
    """SGD: Nesterov momentum."""

    alpha: float | None = None
    """RMSprop: smoothing; ASGD: power of the step size."""

    centered: bool | None = None
    """RMSprop: divide by the variance."""

    rho: float | None = None
    """Adadelta: decay of squared gradients."""

    lr_decay: float | None = None
    """Adagrad: decay of the learning rate."""

    initial_accumulator_value: float | None = None
    """Adagrad: start of the accumulator."""

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
    """torch: one kernel over many tensors; null lets torch choose."""

    fused: bool | None = None
    """torch: one fused kernel. Left out or null: used where torch has one (Adam, AdamW, SGD, Adagrad)."""

    maximize: bool | None = None
    """torch: ascend instead of descend."""

    capturable: bool | None = None
    """torch: safe inside a CUDA graph."""

    differentiable: bool | None = None
    """torch: autograd through the step."""


class OptimizerConfig(Section):
    """The optimizer and its keywords."""

    without_effect: ClassVar[dict[str, str]] = {
        "legacy_fusion": "it chooses between two of DeepSpeed's fp16 wrappers, which compute the same",
    }
    type: str
    """Adam, AdamW, Lion, Lamb, Muon, Adagrad, SGD or another elementwise class of torch.optim; AdamW8bit and its like
    with bitsandbytes, MuAdam, MuAdamW and MuSGD with mup installed. Upper and lower case do not matter.
    Muon steps parameters of two or more dimensions whose name has neither "embed" nor "lm_head" in it (`use_muon` set
    on a parameter overrules that), AdamW the others."""

    legacy_fusion: bool = False
    """DeepSpeed: an old wrapper of its fused Adam in fp16."""

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
            defaults["weight_decay"] = 0.01  # torch's AdamW, taken as it is
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
            raise complaint(f"{kind} cannot step on sharded state: it {NOT_ON_SHARDS[kind]}", "use AdamW")
        if kind in REMOVED:
            raise complaint(f"{kind} was removed from DeepSpeed itself", "use AdamW")
        near = meant(name) or nearest(name, TYPES)
        fix = f'did you mean "{near}"?' if near else f"use one of {', '.join(TYPES)}"
        raise complaint(f"unknown optimizer type {in_json(name)}", fix)
