"""The job of every peer: the same seeded Llama, text, order and AdamW, so that losses are comparable step by step."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import LlamaForCausalLM

VOCAB = 256  # a token is a byte


@dataclass(frozen=True)
class Size:
    """Dimensions of a Llama."""

    hidden: int
    layers: int
    heads: int
    intermediate: int

    @property
    def parameters(self) -> int:
        """Return the number of parameters, with untied embedding and head."""
        block = 4 * self.hidden**2 + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * block + 2 * VOCAB * self.hidden + self.hidden


SIZES = {
    "tiny": Size(192, 4, 4, 512),  # 1.9 M
    "small": Size(512, 8, 8, 1376),  # 25.6 M
    "medium": Size(768, 16, 12, 2048),  # 113.7 M
}
ADAM: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


@dataclass(frozen=True)
class Work:
    """The job of one run. Batch sizes count sequences; `warmup` steps are not timed."""

    model: str = "tiny"
    dtype: str = "fp32"
    seq: int = 128
    global_batch: int = 8
    micro_batch: int = 2
    steps: int = 20
    warmup: int = 3

    def accumulation(self, shares: int) -> int:
        """Return the microbatches per rank and step, for a global batch split into so many shares."""
        return self.global_batch // (shares * self.micro_batch)


def llama_config(size: str) -> Any:
    """Return the Hugging Face config of a named size."""
    return config_of(SIZES[size])


def config_of(s: Size) -> Any:
    """Return the Hugging Face config of a size."""
    from transformers import LlamaConfig

    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": s.hidden,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.heads,
        "intermediate_size": s.intermediate,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "use_cache": False,
        "attention_dropout": 0.0,
        "attn_implementation": "sdpa",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return LlamaConfig(**fields)


def build_model(size: str, seed: int = 0) -> LlamaForCausalLM:
    """Return the model in fp32 and training mode, with the same values on every rank."""
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(llama_config(size))
    model.train()
    return model


def lm_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the cross entropy of the next byte, mean over tokens; logits (batch, seq, vocab), ids (batch, seq)."""
    import torch.nn.functional as F

    logits = logits[:, :-1].float()
    return F.cross_entropy(logits.reshape(-1, logits.size(-1)), ids[:, 1:].reshape(-1))


class Text:
    """The standard library's sources as bytes, split into sequences in a fixed order."""

    # Coprime to the length, so that consecutive sequences come from distant parts of the text.
    STRIDE = 1_000_003
    LIMIT = 8 << 20

    def __init__(self, seq: int) -> None:
        import torch

        text = bytearray()
        for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            text += file.read_bytes()
            if len(text) >= self.LIMIT:
                break
        self.tokens = torch.frombuffer(text, dtype=torch.uint8)
        self.seq = seq

    def sequence(self, index: int) -> Tensor:
        """Return token ids of shape (seq,)."""
        start = (index * self.STRIDE) % (len(self.tokens) - self.seq)
        return self.tokens[start : start + self.seq].long()

    def step(self, step: int, work: Work, share: int, shares: int) -> list[Tensor]:
        """Return the microbatches of a step for one of several equal, contiguous shares of the global batch."""
        import torch

        size = work.global_batch // shares
        first = step * work.global_batch + share * size
        rows = [self.sequence(first + i) for i in range(size)]
        return [torch.stack(rows[i : i + work.micro_batch]) for i in range(0, size, work.micro_batch)]
