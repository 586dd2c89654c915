"""The Llama as a list of modules that take and return one tensor, for peers that split a list into stages."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.workload import build_model


class Block(nn.Module):
    """A decoder block; causal attention needs no mask.

    Each block computes the rotary table from the shape of the hidden states, so only these are sent between stages.
    """

    def __init__(self, block: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.block, self.rotary = block, rotary

    def forward(self, hidden: Tensor) -> Tensor:
        positions = torch.arange(hidden.shape[1]).unsqueeze(0)
        tables = self.rotary(hidden, position_ids=positions)
        out: Tensor = self.block(hidden, attention_mask=None, position_embeddings=tables)
        return out


def pieces(size: str) -> list[nn.Module]:
    """Return embedding, blocks, norm and head."""
    model = build_model(size)
    decoder = model.model
    blocks = [Block(block, decoder.rotary_emb) for block in decoder.layers]
    return [decoder.embed_tokens, *blocks, nn.Sequential(decoder.norm, model.lm_head)]
