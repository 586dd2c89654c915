"""`deepspeed.runtime.pipe.schedule`: pipeline schedules as lists of instructions, one list per clock tick.

In 1F1B, stage s of S computes the forward of microbatch m at tick s + 2m, and its backward at
2S - 1 - s + 2m. Results are sent at the next tick, when the neighbour needs them. The engine runs its own
schedules (`pipeline.schedule`); these are for programs that read, draw or test a schedule.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any


class PipeInstruction:
    """An instruction; its keyword arguments become attributes."""

    def __init__(self, **kwargs: Any) -> None:
        self.name = type(self).__name__
        self.kwargs = kwargs
        for key, value in kwargs.items():
            setattr(self, key, value)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.kwargs.items())})"


class BufferOpInstruction(PipeInstruction):
    """An instruction that operates on the buffer of a microbatch in flight."""

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
    """The schedule of one stage.

    Args:
        micro_batches: number of microbatches per optimizer step.
        stages: number of pipeline stages.
        stage_id: index of this stage.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        self.micro_batches, self.stages, self.stage_id = micro_batches, stages, stage_id
        self.prev_stage, self.next_stage = stage_id - 1, stage_id + 1
        self._steps: Iterator[list[PipeInstruction]] | None = None

    @abstractmethod
    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each tick."""

    def num_pipe_buffers(self) -> int:
        """Return the number of buffers that are needed; instructions count them from 0."""
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
    """The 1F1B schedule."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        last = 2 * (self.micro_batches + self.stages - 1) - 1
        for moment in range(last + 1):
            now: list[PipeInstruction] = [*self._travelling(moment), *self._computing(moment)]
            if moment == last:
                now += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            yield now

    def num_pipe_buffers(self) -> int:
        """Return the maximum number of microbatches in flight, but at least two."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))

    def _forward_at(self, moment: int) -> int | None:
        """Return the microbatch whose forward this stage computes at a tick, or None."""
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
    """Forward only: stage s computes microbatch m at tick s + m."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for moment in range(self.micro_batches + self.stages - 1):
            yield list(self._at(moment - self.stage_id))

    def num_pipe_buffers(self) -> int:
        return 2

    def _at(self, number: int) -> Iterator[PipeInstruction]:
        # Even stages send first and odd stages receive first, so that the calls of neighbours match.
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
    """No pipeline: forward and backward of every microbatch, then the optimizer step."""

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
