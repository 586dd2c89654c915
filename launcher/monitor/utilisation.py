"""Model FLOPs utilisation (MFU): the FLOPs that a model needs for its tokens, relative to the devices' peak
(PaLM, arXiv:2204.02311, appendix B). Recomputation does not count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from launcher.monitor.devices import peak_flops


def flops_per_token(config: Any, parameters: float, length: int) -> float:
    """Return the FLOPs per token in forward and backward: 6 per active parameter, plus unmasked attention.

    Args:
        config: config of a transformers model.
        parameters: active parameters per token; for experts, only the chosen ones.
        length: sequence length in tokens.
    """
    text = config.get_text_config()
    tied = bool(getattr(text, "tie_word_embeddings", False))
    looked_up = 0 if tied else text.vocab_size * text.hidden_size  # a tied embedding is the head's weight
    heads = text.num_attention_heads
    width = heads * (getattr(text, "head_dim", None) or text.hidden_size // heads)
    return float(6 * (parameters - looked_up) + 12 * text.num_hidden_layers * width * length)


@dataclass(frozen=True)
class Utilisation:
    """Converts a run's tokens per second to MFU.

    Args:
        flops: FLOPs per token.
        peak: peak 16-bit FLOP/s of all devices.
    """

    flops: float
    peak: float

    def of(self, tokens_per_s: float) -> float:
        """Return the utilised share of the peak, 0 to 1."""
        return tokens_per_s * self.flops / self.peak


def peak_of(device: torch.device) -> float | None:
    """Return the peak FLOP/s of a device; None if it is unknown, as for CPUs."""
    return peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
