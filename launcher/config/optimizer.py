"""`optimizer`: Adam, AdamW, SGD and the classes of torch.optim that can step on flat shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import Field, field_validator

from launcher.config.problems import show
from launcher.config.section import Conflict, Pair, Remark, Section, complaint
from launcher.config.suggest import nearest

_COMMON = ("lr", "weight_decay", "foreach", "maximize", "differentiable")
_ADAM = (*_COMMON, "betas", "eps", "amsgrad", "capturable", "fused")
_SWITCHES = ("torch_adam", "adam_w_mode", "bias_correction")
"""DeepSpeed's own keywords of Adam, which torch's classes do not take."""


class OptimizerType(NamedTuple):
    """What is known of an optimizer without importing torch.

    Attributes:
        lr: learning rate when none is written.
        keywords: keys that its params take.
    """

    lr: float
    keywords: tuple[str, ...]


TYPES: dict[str, OptimizerType] = {
    "Adam": OptimizerType(1e-3, (*_ADAM, *_SWITCHES)),
    "AdamW": OptimizerType(1e-3, (*_ADAM, *_SWITCHES)),
    "SGD": OptimizerType(1e-3, (*_COMMON, "momentum", "dampening", "nesterov", "fused")),
    "Adagrad": OptimizerType(1e-2, (*_COMMON, "lr_decay", "initial_accumulator_value", "eps", "fused")),
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
"""Types that can be used; names as in torch.optim."""

NOT_ON_SHARDS: dict[str, str] = {
    "LBFGS": "needs the loss again and again within a step",
    "SparseAdam": "needs sparse gradients",
    "Adafactor": "needs the rows and columns of whole matrices",
    "Muon": "needs whole matrices",
}
"""torch.optim classes that cannot step on flat shards yet -> why."""

NOT_YET: frozenset[str] = frozenset({"Lamb", "Lion", "MuAdam", "MuAdamW", "MuSGD"})
"""DeepSpeed's own types that are still to come."""

REMOVED: frozenset[str] = frozenset({"OneBitAdam", "OneBitLamb", "ZeroOneAdam"})
"""Types that DeepSpeed itself dropped in 0.19.8."""


class OptimizerParams(Section):
    """Keywords of the optimizer. None: not written, the class's own default holds."""

    lr: Annotated[float, Field(ge=0)] = 1e-3
    """Learning rate."""

    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Weight decay; 0 for Adam and AdamW when left out, as in DeepSpeed; 0.01 for AdamW with torch_adam."""

    betas: Pair | None = None
    """Adam family: decay of the first and second moment, each in [0, 1)."""

    eps: Annotated[float, Field(ge=0)] | None = None
    """Added to a denominator."""

    adam_w_mode: bool = True
    """Adam: decoupled weight decay, that is AdamW; false: weight decay as L2. AdamW is always decoupled."""

    torch_adam: bool = False
    """DeepSpeed: torch's class instead of its fused one. Here it is always torch's."""

    bias_correction: bool = True
    """Adam: correct the moments for their start at zero; false is not implemented yet."""

    amsgrad: bool | None = None
    """Adam family: the largest second moment so far (Reddi et al. 2018)."""

    momentum: Annotated[float, Field(ge=0)] | None = None
    """SGD, RMSprop: momentum."""

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

    def conflicts(self) -> Iterator[Conflict]:
        if isinstance(self.betas, tuple) and not all(0 <= beta < 1 for beta in self.betas):
            what = f"each must be in [0, 1), not {list(self.betas)}"
            yield Conflict(("betas",), what, "write [0.9, 0.999]")
        if self.bias_correction is False:
            what = "false is not implemented here yet: torch's classes always correct"
            yield Conflict(("bias_correction",), what, "delete it, or write true")


class OptimizerConfig(Section):
    """Which optimizer, and its keywords."""

    type: str
    """Adam, AdamW, SGD or a class name of torch.optim; upper and lower case do not matter."""

    params: OptimizerParams = Field(default_factory=OptimizerParams)
    """Keywords of the optimizer."""

    @classmethod
    def defaults_of(cls, key: str, tree: Mapping[str, Any]) -> Mapping[str, Any]:
        kind = canonical(tree.get("type"))
        if key != "params" or kind not in TYPES:
            return {}
        if kind not in ("Adam", "AdamW"):
            return {"lr": TYPES[kind].lr}
        params = tree.get("params")
        written = params if isinstance(params, dict) else {}
        decoupled = kind == "AdamW" or written.get("adam_w_mode", True)
        # torch_adam takes torch's class as it is, and its AdamW decays by 0.01.
        decay = 0.01 if decoupled and written.get("torch_adam") is True else 0.0
        return {"lr": TYPES[kind].lr, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": decay}

    def to_dict(self) -> dict[str, Any]:
        keywords, params = TYPES[self.type].keywords, self.params.to_dict().items()
        kept = {key: value for key, value in params if key in keywords and value is not None}
        return {"type": self.type, "params": kept}

    @field_validator("type")
    @classmethod
    def _known_type(cls, name: str) -> str:
        kind = canonical(name)
        if kind in TYPES:
            return str(kind)
        if kind in NOT_ON_SHARDS:
            raise complaint(f"{kind} cannot step on sharded state yet: it {NOT_ON_SHARDS[kind]}", "use AdamW")
        if kind in NOT_YET:
            raise complaint(f"DeepSpeed's {kind} is not implemented here yet", "use AdamW")
        if kind in REMOVED:
            raise complaint(f"{kind} was removed from DeepSpeed itself", "use AdamW")
        near = nearest(name, TYPES)
        meant = f'did you mean "{near}"?' if near else f"use one of {', '.join(TYPES)}"
        raise complaint(f"there is no optimizer {show(name)}", meant)

    def conflicts(self) -> Iterator[Conflict]:
        keywords = TYPES[self.type].keywords
        for key in self.params.given():
            if key not in keywords and getattr(self.params, key) is not None:
                takers = [name for name, kind in TYPES.items() if key in kind.keywords]
                yield Conflict(
                    (f"params.{key}",),
                    f"{self.type} has no such keyword; it is one of {', '.join(takers)}",
                    f"delete it; {self.type} takes {', '.join(sorted(keywords))}",
                )

    def remarks(self) -> Iterator[Remark]:
        if self.type == "Adam" and self.params.adam_w_mode and self.params.weight_decay:
            yield Remark("type", '"Adam" decays weights as AdamW does, because params.adam_w_mode is true')


def canonical(name: Any) -> str | None:
    """The optimizer's name in its own spelling, whatever case it was written in; None if there is none."""
    spellings = {known.lower(): known for known in (*TYPES, *NOT_ON_SHARDS, *NOT_YET, *REMOVED)}
    return spellings.get(name.lower()) if isinstance(name, str) else None
