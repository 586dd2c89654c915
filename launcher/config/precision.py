"""`fp16`, `bf16`, `fp8`, `torch_autocast` and `data_types`: mixed precision."""

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
    lower,
    readings,
    short_name,
    stage_in,
)


class Fp16Config(Section):
    """Train in float16 with loss scaling (Micikevicius et al. 2018, arXiv:1710.03740)."""

    differs: ClassVar[dict[str, str]] = {
        "min_loss_scale": "the error of an overflow at this bound names the parameters, and recipes save a "
        "checkpoint first",
        "hysteresis": "works the same at every stage; DeepSpeed's stage 0 halves the scale at the first overflow",
        "fp16_master_weights_and_grads": "works at every stage, on every device and with every optimizer; "
        "moments stay float32",
    }
    differs_where: ClassVar[dict[str, Callable[[Any, Mapping[str, Any]], bool]]] = {
        "hysteresis": lambda value, tree: stage_in(tree) == 0,
    }

    enabled: bool = False
    """Parameters and gradients are float16. Not together with bf16.enabled or torch_autocast.enabled."""

    auto_cast: bool = False
    """Cast floating-point inputs of the model to float16."""

    loss_scale: Annotated[float, Field(ge=0)] = 0.0
    """Fixed loss scale; 0 enables dynamic loss scaling."""

    initial_scale_power: Annotated[WholeNumber, Field(le=127)] = 16
    """Initial dynamic loss scale, as a power of 2."""

    loss_scale_window: Count = 1000
    """Steps without overflow before a dynamic scale doubles; it doubles in the step after them."""

    hysteresis: Count = 2
    """Overflows before a dynamic scale halves: the first hysteresis - 1 only skip the step."""

    consecutive_hysteresis: bool = False
    """Reset the count of `hysteresis` after a step without overflow."""

    min_loss_scale: Annotated[float, Field(ge=0)] = 1
    """Lower bound of a dynamic scale, at least 1; an overflow at this bound ends the run."""

    fp16_master_weights_and_grads: bool = False
    """Step the float16 weights directly, without a float32 copy of them. This saves 4 bytes per parameter,
    but updates smaller than 1/2048 of a weight are lost. Moments are float32."""

    @classmethod
    def is_unused(cls, key: str, values: Mapping[str, Any], tree: Mapping[str, Any]) -> bool:
        """Return whether `key` is for a dynamic scale, but the scale is fixed or float16 is not used."""
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
    """Train in bfloat16, with float32 master weights unless configured otherwise below."""

    without_effect: ClassVar[dict[str, str]] = {
        "immediate_grad_update": "gradients are always added to their buffer as soon as the backward of their unit "
        "ends, so there are never more 16-bit gradients than those of one unit",
    }
    differs: ClassVar[dict[str, str]] = {
        "check_grad_overflow": "the message of a skipped step names the parameters",
        "bf16_master_weights_and_grads": "works at every stage, on every device and with every optimizer",
        "bf16_optimizer_states": "works with every optimizer",
    }

    enabled: bool = False
    """Parameters and gradients are bfloat16. Not together with fp16.enabled or torch_autocast.enabled."""

    check_grad_overflow: bool = True
    """Skip the step if a gradient is infinite or NaN (DeepSpeed's default since June 2026)."""

    immediate_grad_update: bool = False
    """DeepSpeed can add each gradient to its float32 buffer immediately instead of at the end of the
    backward; here this is always done, for every `data_types.grad_accum_dtype`."""

    bf16_master_weights_and_grads: bool = False
    """Step the bfloat16 weights directly, without a float32 copy of them. This saves 4 bytes per parameter,
    but updates smaller than 1/256 of a weight are lost. Moments are float32 unless `bf16_optimizer_states` is
    set."""

    bf16_optimizer_states: bool = False
    """Keep the optimizer's moments in bfloat16 too, which saves 4 bytes per parameter with Adam. Requires
    `bf16_master_weights_and_grads`."""


class Fp8Config(Section):
    """Compute the products of linear layers in float8 (Micikevicius et al. 2022, arXiv:2209.05433), with torchao.

    Inputs, weights and output gradients are cast for each product, with scales computed from their present values.
    Parameters, gradients and optimizer states keep the dtypes of the other sections. On a device without float8
    products the same numbers are computed more slowly, and a warning says so.
    """

    differs: ClassVar[dict[str, str]] = {
        key: "a key of this launcher" for key in ("enabled", "recipe", "exclude", "all_gather")
    }

    enabled: bool = False
    """Convert the linear layers whose sizes are multiples of 16 (with tensor parallelism, of 16 x its degree),
    except the output head of a Hugging Face model, routers of experts, factors of adapters, quantized layers and
    those in `exclude`. Experts that transformers computes with grouped products stay as they are."""

    recipe: Annotated[Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"], BeforeValidator(lower)] = (
        "tensorwise"
    )
    """The recipe of torchao. tensorwise: one scale per tensor, the fastest. rowwise: one scale per row, more accurate.
    rowwise_with_gw_hp: rowwise, with weight gradients computed in bfloat16. The last two need bfloat16."""

    exclude: Names = ()
    """Layers that are not converted: full names, or parts of a name between its dots, with `*` for any characters, for
    example "model.layers.0.*" or "down_proj"."""

    all_gather: bool = False
    """At ZeRO stage 3 with the recipe tensorwise, cast weights before they are gathered: half of the bytes of bfloat16
    are sent, and in bfloat16 the products are bit for bit the same. It is an error if the model reads such a weight
    other than through its layer. Takes precedence over `zero_optimization.zero_quantized_weights` for these weights."""


def _full_names(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if "." not in name:
            raise complaint(
                f"{show(name)} is not a fully qualified name", 'write for example "torch.nn.Linear"'
            )
    return names


class TorchAutocastConfig(Section):
    """Keep the model in float32 and run its forward under torch.autocast, which chooses a dtype for each operation."""

    differs: ClassVar[dict[str, str]] = {
        "dtype": "with float16, the loss is scaled as set in the `fp16` section, not by torch's GradScaler",
        "lower_precision_safe_modules": "null: nothing is stored or sent in 16 bits; in DeepSpeed, torch's Linear and "
        "Conv are. A list: these weights are also stored in the lower dtype, in addition to float32 master weights",
    }

    enabled: bool = False
    """Run the forward under torch.autocast. Not together with fp16.enabled or bf16.enabled."""

    dtype: Annotated[Literal["fp16", "bf16"] | None, BeforeValidator(short_name)] = None
    """Dtype of the operations that autocast covers, "bfloat16" or "float16". Null: bfloat16. With float16,
    the loss is scaled with the settings of the `fp16` section, whose `enabled` stays false."""

    lower_precision_safe_modules: Annotated[Names, AfterValidator(_full_names)] | None = None
    """Fully qualified names of module classes ("torch.nn.Linear") whose parameters are stored, gathered and
    reduced in the lower dtype, with float32 master weights. At stage 3 this halves the volume of all-gathers,
    and only the shards are kept between forward and backward. Null or []: none; autocast casts the float32
    weights at each use."""


class DataTypesConfig(Section):
    """Additional dtypes."""

    differs: ClassVar[dict[str, str]] = {
        "keep_in_fp32_modules": "parameters are kept in float32 too, not only buffers, at every stage",
    }

    grad_accum_dtype: Dtype | None = None
    """Dtype in which gradients are accumulated over microbatches. Null: the dtype of the model."""

    param_dtype: Dtype | None = None
    """Dtype of the parameters; it must agree with `fp16` and `bf16`. Null: as these set it."""

    buffer_dtype: Dtype | None = None
    """Dtype that the model's floating-point buffers are cast to. Null: they are not cast."""

    keep_in_fp32_modules: Names | None = None
    """Parameters and buffers that stay float32 in a 16-bit model, by substrings of their names, with `*` for
    any characters. Null or "auto": those that a Hugging Face model lists itself
    (`_keep_in_fp32_modules_strict`, and `_keep_in_fp32_modules` under fp16). []: none."""
