"""Model FLOPs utilisation (MFU): the operations that a model needs for its tokens, of those that the devices could do
(PaLM, arXiv:2204.02311, appendix B). What is recomputed does not count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from launcher.monitor.devices import peak_flops


def flops_per_token(config: Any, parameters: float, length: int) -> float:
    """Return the operations of a token in forward and backward: 6 for each parameter that it goes through, and those
    of attention, as if no mask left anything out.

    Args:
        config: of a transformers model.
        parameters: that a token goes through; of experts those of the chosen ones.
        length: tokens of a sequence.
    """
    text = config.get_text_config()
    tied = bool(getattr(text, "tie_word_embeddings", False))
    looked_up = 0 if tied else text.vocab_size * text.hidden_size  # tied, they are the head's
    heads = text.num_attention_heads
    width = heads * (getattr(text, "head_dim", None) or text.hidden_size // heads)
    return float(6 * (parameters - looked_up) + 12 * text.num_hidden_layers * width * length)


@dataclass(frozen=True)
class Utilisation:
    """The figures that turn a run's tokens per second into MFU.

    Args:
        flops: of a token.
        peak: operations per second of all devices, in 16 bits.
    """

    flops: float
    peak: float

    def of(self, tokens_per_s: float) -> float:
        """Return the part of the peak that is used, 0 to 1."""
        return tokens_per_s * self.flops / self.peak


def peak_of(device: torch.device) -> float | None:
    """Return the operations per second that a device can do; None where that is not known, as of a CPU."""
    return peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
