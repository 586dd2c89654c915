"""Closed forms of the time in which ranks are idle, where all virtual stages cost the same and transfers nothing."""

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
        forward, input, weight: what the whole share of a rank, all its chunks, takes for one microbatch: F, I and W.

    Returns:
        in the unit of the costs; None where no closed form is known. Of the ideal time that is `/ (m (F + I + W))`.

        gpipe, 1f1b, pipedream, 2bw   (P-1)(F+I+W); the last two have it once in a stream of steps that do not drain,
                                      however many they are
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
