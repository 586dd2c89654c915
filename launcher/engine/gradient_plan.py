"""Decides when a step reduces gradients and gathers parameters, for the engine and the memory estimate."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from launcher.config.parallelism import PipelineConfig
from launcher.zero.reduce import BackwardPlan, ReduceListener, Reducer
from launcher.zero.unshard import Unsharder


@dataclass(frozen=True)
class GradientPlan:
    """When the microbatches of a step reduce gradients and gather parameters.

    Args:
        reduces_each: Sharded gradients are reduced after every microbatch, not only after the last one.
        gathers_each: Sharded parameters are gathered for every microbatch, not once per step.
        updates_inside: Each microbatch updates the weights.
        chunks: Virtual stages per rank. With several, the last backward of a step covers only one of them.
    """

    reduces_each: bool
    gathers_each: bool
    updates_inside: bool = False
    chunks: int = 1

    @classmethod
    def of(cls, section: PipelineConfig, *, is_whole: bool) -> GradientPlan:
        """Return the plan for the `pipeline` section, or for a model that is not cut into stages."""
        if is_whole:
            return cls(reduces_each=True, gathers_each=True)
        return cls(
            section.reduce_per_microbatch or section.updates_inside,
            section.gather_per_microbatch,
            section.updates_inside,
            section.chunks_of_rank,
        )

    def begin_backward(
        self,
        reducer: Reducer,
        blocks: Collection[str] | None,
        *,
        last: bool,
        listener: ReduceListener | None = None,
    ) -> None:
        """Set the reducer's plan for the next backward.

        Args:
            blocks: see `BackwardPlan`.
            last: Whether this is the last backward of this rank in this step.
            listener: Used by the last backward, if it reduces.
        """
        reduces = self.reduces_each or (last and self.chunks == 1)
        reducer.plan = BackwardPlan(
            reduces, last or self.updates_inside, listener if last and reduces else None, blocks
        )

    @contextmanager
    def of_step(self, unsharder: Unsharder, reducer: Reducer) -> Iterator[None]:
        """Wrap the forwards and backwards of a step. On exit, free the parameters first, then reduce the
        remaining gradients, which can reuse the freed memory."""
        try:
            with self.gathering(unsharder):
                yield
            flush(reducer)
        finally:
            reducer.plan = BackwardPlan()

    def gathering(self, unsharder: Unsharder) -> AbstractContextManager[None]:
        """Return a context that keeps sharded parameters gathered, unless each microbatch gathers them."""
        return nullcontext() if self.gathers_each else unsharder.keeping()


def flush(reducer: Reducer) -> None:
    """Reduce the gradients that the last backward did not reduce."""
    if not reducer.plan.reduces:
        reducer.plan = BackwardPlan()
        reducer.flush()
