"""Adam without bias correction (DeepSpeed's `bias_correction: false`), by torch's own kernels."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.optim import Adam, AdamW


class _Uncorrected:
    """At step infinity 1 - beta ** step is exactly 1: torch's kernels, fused ones too, then correct nothing."""

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> Any:
        has_complex = super()._init_group(group, *lists)  # type: ignore[misc]
        for step in lists[-1]:
            step.fill_(math.inf)
        return has_complex


class UncorrectedAdam(_Uncorrected, Adam):  # type: ignore[misc]
    """torch.optim.Adam without bias correction."""


class UncorrectedAdamW(_Uncorrected, AdamW):  # type: ignore[misc]
    """torch.optim.AdamW without bias correction."""
