"""`fp16`, `bf16`, `torch_autocast` and `data_types`: mixed precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from launcher.config.problems import show
from launcher.config.section import (
    Count,
    Dtype,
    Names,
    Section,
    WholeNumber,
    as_switch,
    complaint,
    readings,
    short_name,
    stage_in,
)


class Fp16Config(Section):
    """Train in float16 with loss scaling (Micikevicius et al. 2018, arXiv:1710.03740)."""

    differs: ClassVar[dict[str, str]] = {
        "min_loss_scale": "an overflow at the floor names the parameters, and recipes save a checkpoint first",
        "hysteresis": "the same rule at every stage; DeepSpeed's stage 0 halves the scale at the first overflow",
        "fp16_master_weights_and_grads": "at every stage, on every device and with every optimizer; "
        "moments stay float32",
    }
    differs_where: ClassVar[dict[str, Callable[[Any, Mapping[str, Any]], bool]]] = {
        "hysteresis": lambda value, tree: stage_in(tree) == 0,
    }

    enabled: bool = False
    """Parameters and gradients are float16. Not together with bf16.enabled or torch_autocast.enabled."""

    auto_cast: bool = False
    """Floating-point inputs of the model are cast to float16."""

    loss_scale: Annotated[float, Field(ge=0)] = 0.0
    """Fixed factor of the loss; 0 finds one by itself (dynamic)."""

    initial_scale_power: Annotated[WholeNumber, Field(le=127)] = 16
    """A dynamic scale starts at 2 to this power."""

    loss_scale_window: Count = 1000
    """Steps without overflow before a dynamic scale doubles; the step that doubles it comes after them."""

    hysteresis: Count = 2
    """Overflows before a dynamic scale halves: the first hysteresis - 1 only skip their step."""

    consecutive_hysteresis: bool = False
    """A step without overflow refills the count of `hysteresis`."""

    min_loss_scale: Annotated[float, Field(ge=0)] = 1
    """Floor of a dynamic scale, from 1; an overflow at the floor ends the run."""

    fp16_master_weights_and_grads: bool = False
    """The optimizer steps the float16 weights themselves, and there is no float32 copy of them: 4 bytes a parameter
    less, and steps smaller than 1/2048 of a weight are lost. Moments are float32."""

    @classmethod
    def is_unused(cls, key: str, values: Mapping[str, Any], tree: Mapping[str, Any]) -> bool:
        """Nothing reads the keys of a dynamic scale where the scale is fixed, or where no float16 is computed."""
        if key not in ("initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"):
            return False
        autocast = tree.get("torch_autocast")
        casts = isinstance(autocast, Mapping) and as_switch(autocast.get("enabled")) is not False
        on = as_switch(values.get("enabled", False)) is not False
        written = values.get("loss_scale")
        scale = next((item for item in (written, *readings(written)) if isinstance(item, int | float)), 0)
        fixed = not isinstance(scale, bool) and math.isfinite(scale) and scale > 0
        return fixed or not (on or casts)


class Bf16Config(Section):
    """Train in bfloat16, with float32 master weights unless the keys below say otherwise."""

    without_effect: ClassVar[dict[str, str]] = {
        "immediate_grad_update": "gradients always go into their buffer as soon as the backward of their unit ends, "
        "so there are never more 16-bit gradients than those of a unit",
    }
    differs: ClassVar[dict[str, str]] = {
        "check_grad_overflow": "a step that is skipped names the parameters",
        "bf16_master_weights_and_grads": "at every stage, on every device and with every optimizer",
        "bf16_optimizer_states": "with every optimizer",
    }

    enabled: bool = False
    """Parameters and gradients are bfloat16. Not together with fp16.enabled or torch_autocast.enabled."""

    check_grad_overflow: bool = True
    """Skip the step when a gradient is infinite or not a number (DeepSpeed's default since June 2026)."""

    immediate_grad_update: bool = False
    """DeepSpeed can add each gradient to its float32 buffer at once, not at the end of the backward; here that is
    always so, for every `data_types.grad_accum_dtype`."""

    bf16_master_weights_and_grads: bool = False
    """The optimizer steps the bfloat16 weights themselves, and there is no float32 copy of them: 4 bytes a parameter
    less, and steps smaller than 1/256 of a weight are lost. Moments are float32 unless `bf16_optimizer_states`."""

    bf16_optimizer_states: bool = False
    """The optimizer's moments are bfloat16 too: with Adam 4 bytes a parameter less. Needs
    `bf16_master_weights_and_grads`."""


def _full_names(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if "." not in name:
            raise complaint(f"names {show(name)}, without its package", 'write for example "torch.nn.Linear"')
    return names


class TorchAutocastConfig(Section):
    """Keep the model in float32 and run its forward under torch.autocast, which chooses a dtype for each operation."""

    differs: ClassVar[dict[str, str]] = {
        "dtype": "float16 is scaled by the rule and the numbers of the `fp16` section, not by torch's GradScaler",
        "lower_precision_safe_modules": "null: nothing is held or sent in 16 bits; DeepSpeed: torch's Linear and Conv. "
        "A list: these weights are also held in the lower dtype, beside float32 master weights",
    }

    enabled: bool = False
    """Run the forward under torch.autocast. Not together with fp16.enabled or bf16.enabled."""

    dtype: Annotated[Literal["fp16", "bf16"] | None, BeforeValidator(short_name)] = None
    """Dtype of the operations that autocast covers: "bfloat16" or "float16"; null is bfloat16. float16 has a loss
    scale, by the numbers of the `fp16` section, whose `enabled` stays false."""

    lower_precision_safe_modules: Annotated[Names, AfterValidator(_full_names)] | None = None
    """Full names of module classes ("torch.nn.Linear") whose parameters are held, gathered and reduced in the lower
    dtype, with float32 master weights. At stage 3 that halves the gathers, and nothing but the shards is kept from
    forward to backward. Null or []: none; autocast casts the float32 weights at each use."""


class DataTypesConfig(Section):
    """Extra choices of dtype."""

    differs: ClassVar[dict[str, str]] = {
        "keep_in_fp32_modules": "parameters are kept in float32 too, not only buffers, at every stage",
    }

    grad_accum_dtype: Dtype | None = None
    """Dtype in which gradients of several microbatches are summed; null: the dtype of the model."""

    param_dtype: Dtype | None = None
    """Dtype of the parameters. It follows from `fp16` and `bf16`; another one is refused. Null: what they say."""

    buffer_dtype: Dtype | None = None
    """Dtype that the model's floating-point buffers are cast to; null leaves them as they are."""

    keep_in_fp32_modules: Names | None = None
    """Parameters and buffers that stay float32 in a 16-bit model: parts of their names, `*` for any characters. Null or
    "auto": what a Hugging Face model names itself (`_keep_in_fp32_modules_strict`, and `_keep_in_fp32_modules` under
    fp16). []: none."""
