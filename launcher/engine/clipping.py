"""The norm of a step's gradients, and the coefficient that clips them."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from launcher.engine.finite import check_unused

if TYPE_CHECKING:
    from launcher.engine.core import EngineCore

logger = logging.getLogger("launcher")


class Clipping:
    """Computes the gradient norm of the current step, and the clipping coefficient.

    Args:
        limit: maximum norm (`gradient_clipping`); 0 disables clipping.
    """

    def __init__(self, limit: float) -> None:
        self._limit, self._asked = limit or math.inf, math.inf
        self._norm: float | None = None

    def grad_norm(self, engine: EngineCore) -> float:
        """Return the norm of the gradients over all ranks, computed once per step. Collective.

        Raises:
            LauncherError: ranks of one model replica (cp or tp) had different inputs.
            UnusedParametersError: `ignore_unused_parameters` is false.
        """
        if self._norm is None or not engine.zero.reducer.norm_computed:
            self._asked = math.inf
            compares = engine.inputs.active
            more = engine.inputs.share() if compares else None
            squares, used, same = engine.zero.norm_and_use(more)
            if compares:
                engine.inputs.judge(same, engine.global_steps + 1)
            if not engine.resolved.zero_optimization.ignore_unused_parameters:
                check_unused(engine.zero, used)
            total = float(squares)
            self._norm = math.sqrt(total) / engine.gradient_divisor() if math.isfinite(total) else total
        return self._norm

    def set_max_norm(self, limit: float) -> None:
        """Clip this step at `limit` if that is less than `gradient_clipping`."""
        self._asked = min(self._asked, limit)

    def take_coefficient(self, norm: float) -> float:
        """Return the clipping coefficient for gradients of this norm, and reset for the next step."""
        limit = min(self._limit, self._asked)
        self._asked, self._norm = math.inf, None
        return min(1.0, limit / (norm + 1e-6))  # as torch does
