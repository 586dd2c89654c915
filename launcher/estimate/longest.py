"""The longest sequence that fits a device, as the JSON is, and with one lever after the other. All is estimated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from launcher.config import Config
from launcher.errors import LauncherError
from launcher.estimate.estimator import Estimator
from launcher.estimate.variants import ConfigChanges, edited

FIRST, STEP, MOST = 1024, 256, 1 << 25  # tokens
NEAR = 0.01  # of the longest: the search ends there
CHECKPOINTING = "activation_checkpointing"


@dataclass(frozen=True)
class LongestSequence:
    """The longest sequence that fits.

    Args:
        change: the lever that was added to those before, as JSON; "" for none.
        tokens: of the longest sequence; 0: not even a short one fits.
        peak: bytes of the fullest rank with it.
        refused: why it cannot be done; else empty.
    """

    change: str
    tokens: int = 0
    peak: int = 0
    refused: str = ""


def longest_sequences(
    estimator: Estimator, config: Config, world: int, device: int
) -> Iterator[LongestSequence]:
    """Yield the longest sequence of the JSON, then with each lever on top of those that could be had.

    Args:
        device: bytes.
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

    What a sequence needs grows with its tokens, nearly in a straight line: each guess is where the line through what
    fits and what does not meets the device."""

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
    """Yield (in words, keys), from those that cost least time on."""
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
