"""`WholeModel`: an uncut model as the only stage of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from launcher.models.state_names import places_of
from launcher.models.units import unit_modules
from launcher.pipeline.crossing import Signature, StageBoundary


class WholeModel:
    """An entire model on one rank. Scripts may call it, and run its backward, directly.

    Attributes: see `StagedPart`.
    """

    is_whole = True
    virtual_stages = 1

    def __init__(self, model: nn.Module) -> None:
        self.model, self.blocks = model, unit_modules(model)
        self.rank_of = [0]
        self.shared: dict[str, tuple[int, ...]] = {}
        self.elsewhere: Mapping[Tensor, str] = {}

    def learned(self, stage: int, signature: Signature) -> StageBoundary:
        """See `StagedPart`."""
        return StageBoundary()

    def tell(self, stage: int, signature: Signature, learned: Any) -> None:
        """See `StagedPart`."""

    def forward(
        self, stage: int, received: tuple[Tensor, ...], signature: Signature, call: Callable[[nn.Module], Any]
    ) -> Any:
        """See `StagedPart`."""
        return call(self.model)

    def names_of(self, stage: int) -> None:
        """See `StagedPart`."""

    def places(self) -> Callable[[str], int]:
        """See `StagedPart`."""
        return places_of(self.model)

    def before_backward(self, stage: int, signature: Signature) -> None:
        """See `StagedPart`."""
