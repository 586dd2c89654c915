"""Closed forms of the bubble time, for virtual stages of equal cost and transfers that take no time."""

from __future__ import annotations


def bubble_time(
    name: str,
    stages: int,
    microbatches: int,
    chunks: int = 1,
    *,
    forward: float = 1,
    input: float = 1,
    weight: float = 1,
) -> float | None:
    """Return how long each rank is idle in a step that starts and ends with an empty pipeline.

    Args:
        name, stages, microbatches, chunks: of the schedule.
        forward, input, weight: F, I and W of one microbatch over all chunks of a rank.

    Returns:
        the bubble in the unit of the costs; None if no closed form is known. Divide by `m (F + I + W)` for
        the bubble relative to the ideal time.

        gpipe, 1f1b, pipedream, 2bw   (P-1)(F+I+W); the last two have it once in any number of undrained steps
        interleaved                   (P-1)(F+I+W) / v; with m < P also (P-m)(F+I+W)(v-1) / v
        zb-h1                         (P-1) max(F, I, F+I-W); F+I-W is the paper's; m >= P
        zbv                           (P-1) F / 2; F = I = W and m >= 2P - 2
    """
    whole = forward + input + weight
    filling = stages - 1
    if name in ("gpipe", "1f1b", "pipedream", "2bw"):
        return filling * whole
    if name == "interleaved":
        missing = max(0, stages - microbatches)
        return (filling + missing * (chunks - 1)) * whole / chunks
    if name == "zb-h1" and microbatches >= stages:
        return filling * max(forward, input, forward + input - weight)
    if name == "zbv" and forward == input == weight and microbatches >= 2 * filling:
        return filling * forward / 2
    return None
