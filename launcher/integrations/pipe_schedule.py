"""`deepspeed.runtime.pipe.schedule`: a schedule as lists of instructions, one list a moment.

The moments of one forward, one backward: stage s of S computes the forward of microbatch m at moment s + 2m, and its
backward at 2S - 1 - s + 2m. What a stage has computed travels at the next moment, when the neighbour needs it.
The engine runs its own schedules (`pipeline.schedule` of the JSON); these are for those that read, draw or test one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any


class PipeInstruction:
    """One thing to do; its keywords are its attributes."""

    def __init__(self, **kwargs: Any) -> None:
        self.name = type(self).__name__
        self.kwargs = kwargs
        for key, value in kwargs.items():
            setattr(self, key, value)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.kwargs.items())})"


class BufferOpInstruction(PipeInstruction):
    """One that works on a buffer of a microbatch in flight."""

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


class OptimizerStep(PipeInstruction): ...


class ReduceGrads(PipeInstruction): ...


class ReduceTiedGrads(PipeInstruction): ...


class LoadMicroBatch(BufferOpInstruction): ...


class ForwardPass(BufferOpInstruction): ...


class BackwardPass(BufferOpInstruction): ...


class SendActivation(BufferOpInstruction): ...


class RecvActivation(BufferOpInstruction): ...


class SendGrad(BufferOpInstruction): ...


class RecvGrad(BufferOpInstruction): ...


class PipeSchedule(ABC):
    """The work of one stage.

    Args:
        micro_batches: of an optimizer step.
        stages: of the pipeline.
        stage_id: of this one.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        self.micro_batches, self.stages, self.stage_id = micro_batches, stages, stage_id
        self.prev_stage, self.next_stage = stage_id - 1, stage_id + 1
        self._steps: Iterator[list[PipeInstruction]] | None = None

    @abstractmethod
    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Return the instructions of each moment."""

    def num_pipe_buffers(self) -> int:
        """Return the buffers that are needed; instructions name them from 0."""
        return self.micro_batches

    @property
    def stage(self) -> int:
        return self.stage_id

    @property
    def num_stages(self) -> int:
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        return self.micro_batches

    @property
    def is_first_stage(self) -> bool:
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage_id == self.stages - 1

    def _valid_micro_batch(self, micro_batch_id: int) -> bool:
        return 0 <= micro_batch_id < self.micro_batches

    def _valid_stage(self, stage_id: int) -> bool:
        return 0 <= stage_id < self.stages

    def _buffer_idx(self, micro_batch_id: int) -> int:
        return micro_batch_id % self.num_pipe_buffers()

    def __iter__(self) -> PipeSchedule:
        self._steps = None
        return self

    def __next__(self) -> list[PipeInstruction]:
        if self._steps is None:
            self._steps = self.steps()
        return next(self._steps)


class TrainSchedule(PipeSchedule):
    """One forward, one backward."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        last = 2 * (self.micro_batches + self.stages - 1) - 1
        for moment in range(last + 1):
            now: list[PipeInstruction] = [*self._travelling(moment), *self._computing(moment)]
            if moment == last:
                now += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            yield now

    def num_pipe_buffers(self) -> int:
        """Return the microbatches that are in flight together, and two at least."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))

    def _forward_at(self, moment: int) -> int | None:
        """Return the microbatch whose forward this stage computes then."""
        return self._of(moment - self.stage_id)

    def _backward_at(self, moment: int) -> int | None:
        return self._of(moment - (2 * self.stages - 1 - self.stage_id))

    def _of(self, distance: int) -> int | None:
        number, odd = divmod(distance, 2)
        return number if not odd and self._valid_micro_batch(number) else None

    def _travelling(self, moment: int) -> Iterator[PipeInstruction]:
        forward, backward = self._forward_at(moment), self._backward_at(moment)
        sent, sent_back = self._forward_at(moment - 1), self._backward_at(moment - 1)
        if sent_back is not None and not self.is_first_stage:
            yield SendGrad(self._buffer_idx(sent_back))
        if forward is not None and not self.is_first_stage:
            yield RecvActivation(self._buffer_idx(forward))
        if backward is not None and not self.is_last_stage:
            yield RecvGrad(self._buffer_idx(backward))
        if sent is not None and not self.is_last_stage:
            yield SendActivation(self._buffer_idx(sent))

    def _computing(self, moment: int) -> Iterator[PipeInstruction]:
        forward, backward = self._forward_at(moment), self._backward_at(moment)
        if forward is not None:
            if self.is_first_stage or self.is_last_stage:
                yield LoadMicroBatch(self._buffer_idx(forward))
            yield ForwardPass(self._buffer_idx(forward))
        if backward is not None:
            yield BackwardPass(self._buffer_idx(backward))


class InferenceSchedule(PipeSchedule):
    """Forwards only: microbatch m is at stage s at moment s + m."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for moment in range(self.micro_batches + self.stages - 1):
            yield list(self._at(moment - self.stage_id))

    def num_pipe_buffers(self) -> int:
        return 2

    def _at(self, number: int) -> Iterator[PipeInstruction]:
        # Neighbours of even and odd stages meet: one sends first, the other receives first.
        receives = (
            [RecvActivation(number % 2)]
            if self._valid_micro_batch(number) and not self.is_first_stage
            else []
        )
        before = number - 1
        sends = (
            [SendActivation(before % 2)] if self._valid_micro_batch(before) and not self.is_last_stage else []
        )
        if self._valid_micro_batch(number) and (self.is_first_stage or self.is_last_stage):
            yield LoadMicroBatch(number % 2)
        yield from [*sends, *receives] if self.stage_id % 2 == 0 else [*receives, *sends]
        if self._valid_micro_batch(number):
            yield ForwardPass(number % 2)


class DataParallelSchedule(PipeSchedule):
    """No pipeline: every microbatch forward and backward, then the step."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for number in range(self.micro_batches):
            now: list[PipeInstruction] = [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0)]
            if number == self.micro_batches - 1:
                now += [ReduceGrads(), OptimizerStep()]
            yield now

    def num_pipe_buffers(self) -> int:
        return 1


def _is_even(x: int) -> bool:
    return x % 2 == 0


def _is_odd(x: int) -> bool:
    return x % 2 == 1
