"""Plans when a step reduces gradients and gathers parameters, for the engine and for the memory estimate."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from launcher.config.parallelism import PipelineConfig
from launcher.zero.reduce import BackwardPlan, ReduceListener, Reducer
from launcher.zero.unshard import Unsharder


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

    def begin_backward(
        self,
        reducer: Reducer,
        blocks: Collection[str] | None,
        *,
        last: bool,
        listener: ReduceListener | None = None,
    ) -> None:
        """Tell the reducer what the coming backward is.

        Args:
            blocks: see `BackwardPlan`.
            last: It is the last one of this rank in this step.
            listener: For the last one, if that reduces.
        """
        reduces = self.reduces_each or (last and self.chunks == 1)
        reducer.plan = BackwardPlan(
            reduces, last or self.updates_inside, listener if last and reduces else None, blocks
        )

    @contextmanager
    def of_step(self, unsharder: Unsharder, reducer: Reducer) -> Iterator[None]:
        """Inside are the forwards and backwards of a step. At its end parameters are freed, and then what the last
        backward has left is reduced: in their memory."""
        try:
            with self.gathering(unsharder):
                yield
            flush(reducer)
        finally:
            reducer.plan = BackwardPlan()

    def gathering(self, unsharder: Unsharder) -> AbstractContextManager[None]:
        """Inside, sharded parameters stay gathered for all microbatches, unless each gathers them."""
        return nullcontext() if self.gathers_each else unsharder.keeping()


def flush(reducer: Reducer) -> None:
    """Reduce what the last backward has not."""
    if not reducer.plan.reduces:
        reducer.plan = BackwardPlan()
        reducer.flush()
