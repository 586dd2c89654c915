"""Measures forward and backward of each layer of a `PipelineModule` separately."""

from __future__ import annotations

from typing import Any

from launcher.pipeline.partition.measure import LOSS, ROUNDS, MeasureOptions, PartClock, on_device, set_up
from launcher.pipeline.sequential.layers import PipelineModule


def measure_row(
    row: PipelineModule, inputs: Any, labels: tuple[Any, ...], way: MeasureOptions
) -> list[float]:
    """Return the seconds of forward plus backward of one microbatch in each layer. Layers are built one at a
    time.

    Args:
        inputs, labels: of one microbatch, on the device. The time of the loss is added to the last layer.
    """
    clock, again = PartClock(way.device), set()
    with set_up(way):
        for _ in range(ROUNDS):
            clock.start_round()
            states = inputs
            for index in range(len(row)):
                layer = row.build(index, index + 1)
                with on_device(layer.named_modules(), way):
                    states = clock.run(str(index), layer, states)
                if way.recomputed and not layer.interval and any(True for _ in layer.parameters()):
                    again.add(index)
            if row.loss_fn is not None and labels:
                clock.run(LOSS, row.loss_fn, states, *labels)
    seconds = [clock.seconds(str(index), again=index in again) for index in range(len(row))]
    seconds[-1] += clock.seconds(LOSS)
    return seconds
