"""`data_types`: dtypes that are chosen apart from fp16 and bf16."""

from __future__ import annotations

from typing import Literal, TypeAlias

from launcher.config.section import Section

Dtype: TypeAlias = Literal["fp32", "fp16", "bf16"]


class DataTypesConfig(Section):
    """Extra choices of dtype."""

    grad_accum_dtype: Dtype | None = None
    """Dtype in which gradients of several microbatches are summed; null: the dtype of the model."""
