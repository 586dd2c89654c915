"""The times at which a step reduces gradients and gathers parameters: the engine asks it, and so does the estimate."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.config.pipeline import PipelineConfig
from launcher.zero.reduce import BackwardPlan, ReduceListener


@dataclass(frozen=True)
class GradientPlan:
    """The treatment of gradients and parameters by the microbatches of a step.

    Args:
        reduces_each: Gradients that are sharded are reduced after every microbatch, and not only after the last one.
        gathers_each: Parameters that are sharded are gathered for every microbatch, and not once a step.
        updates_inside: Each microbatch makes an update of its own.
        chunks: Virtual stages of a rank. With several, the last backward of a step is of one of them only.
    """

    reduces_each: bool
    gathers_each: bool
    updates_inside: bool = False
    chunks: int = 1

    @classmethod
    def of(cls, section: PipelineConfig, *, is_whole: bool) -> GradientPlan:
        """Return the plan of a model that is cut as the JSON's `pipeline` says, or not at all."""
        if is_whole:
            return cls(reduces_each=True, gathers_each=True)
        return cls(
            section.reduce_per_microbatch or section.updates_inside,
            section.gather_per_microbatch,
            section.updates_inside,
            section.chunks_of_rank,
        )

    def backward(self, *, last: bool, listener: ReduceListener | None = None) -> BackwardPlan:
        """Return what the next backward does.

        Args:
            last: It is the last one of this rank in this step.
            listener: For the last one, if that reduces.
        """
        reduces = self.reduces_each or (last and self.chunks == 1)
        return BackwardPlan(reduces, last or self.updates_inside, listener if last and reduces else None)
