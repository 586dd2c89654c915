"""Estimates the longest sequence that fits a device, as configured and with further memory savings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from launcher.config import Config
from launcher.errors import LauncherError
from launcher.estimate.estimator import Estimator
from launcher.estimate.variants import ConfigChanges, edited

FIRST, STEP, MOST = 1024, 256, 1 << 25  # tokens
NEAR = 0.01  # relative tolerance at which the search ends
CHECKPOINTING = "activation_checkpointing"


@dataclass(frozen=True)
class LongestSequence:
    """The longest sequence that fits.

    Args:
        change: the JSON key added on top of the previous changes; "" for none.
        tokens: length of the sequence; 0 if not even a short one fits.
        peak: peak bytes on the most loaded rank at that length.
        refused: why the change is not possible; else empty.
    """

    change: str
    tokens: int = 0
    peak: int = 0
    refused: str = ""


def longest_sequences(
    estimator: Estimator, config: Config, world: int, device: int
) -> Iterator[LongestSequence]:
    """Yield the longest sequence as configured, then with each change on top of the previous possible ones.

    Args:
        device: usable bytes of the device.
    """
    edits: dict[str, object] = {}
    for words, lever in _levers(config, world):
        tried = {**edits, **lever}
        try:
            tokens, peak = longest(estimator, edited(config, tried), world, device)
        except LauncherError as error:
            yield LongestSequence(words, refused=error.what)
            continue
        edits = tried
        yield LongestSequence(words, tokens, peak)


def longest(estimator: Estimator, config: Config, world: int, device: int) -> tuple[int, int]:
    """Return (tokens, peak in bytes) of the longest sequence that fits the device.

    Memory is almost linear in the sequence length. Each guess interpolates between the longest length that
    fits and the shortest that does not.
    """

    def peak(tokens: int) -> int:
        return max(one.peak for one in estimator.run(config, world, tokens))

    fits, low = 0, 0
    too_long = FIRST
    while (high := peak(too_long)) <= device:
        fits, low = too_long, high
        if too_long >= MOST:
            return fits, low
        too_long *= 2
    if not fits:
        return 0, 0
    while too_long - fits > max(STEP, NEAR * fits):
        share = (device - low) / (high - low)
        guess = fits + int((too_long - fits) * min(0.98, max(0.02, share))) // STEP * STEP
        guess = min(max(guess, fits + STEP), too_long - STEP)
        if (found := peak(guess)) <= device:
            fits, low = guess, found
        else:
            too_long, high = guess, found
    return fits, low


def _levers(config: Config, world: int) -> Iterator[tuple[str, ConfigChanges]]:
    """Yield (description, keys) of changes that save memory, ordered by their cost in time."""
    yield "", {}
    if not config.tiled_loss:
        yield '"tiled_loss": true', {"tiled_loss": True}
    if config.activation_checkpointing is None:
        yield f'"{CHECKPOINTING}": {{}}', {CHECKPOINTING: {}}
    if not config.tiled_mlp:
        yield '"tiled_mlp": true', {"tiled_mlp": True}
    ranks, batch = 2 * config.cp_degree, {"train_batch_size": None, "train_micro_batch_size_per_gpu": 1}
    others = config.pipeline.degree * config.tensor_parallel.degree
    while world % (others * ranks) == 0:
        key = {"context_parallel": None, "sequence_parallel_size": ranks}
        yield f'"sequence_parallel_size": {ranks}', {**key, **batch}
        ranks *= 2
