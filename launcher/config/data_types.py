"""`data_types`: dtypes that are chosen apart from fp16 and bf16."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator

from launcher.config.problems import show
from launcher.config.section import Section, complaint

# torch's own names, which DeepSpeed takes too
_SHORT = {
    **dict.fromkeys(("torch.float32", "float32", "float"), "fp32"),
    **dict.fromkeys(("torch.float16", "float16", "half"), "fp16"),
    **dict.fromkeys(("torch.bfloat16", "bfloat16"), "bf16"),
}


def short_name(value: Any) -> Any:
    """ "torch.bfloat16", or that dtype itself -> "bf16"; everything else is left for the type to refuse."""
    value = str(value) if type(value).__name__ == "dtype" else value  # nothing here imports torch
    return _SHORT.get(value, value) if isinstance(value, str) else value


Dtype: TypeAlias = Annotated[Literal["fp32", "fp16", "bf16"], BeforeValidator(short_name)]
"""A dtype by its short name; torch's names are taken as well."""


def _names(value: Any) -> Any:
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise complaint(f"must be a list of names, not {show(value)}", 'write ["first", "second"]')
    return tuple(value)


Names: TypeAlias = Annotated[tuple[str, ...], BeforeValidator(_names)]
"""A list of names."""


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
