"""The reference for parallel runs: tiny Hugging Face models, fixed data, a plain PyTorch loop.

sequences of step s = batch(s, ...)                     the same on every topology
microbatches of a rank = share(ids, rank, world, acc)   world * acc equal parts
truth = train_plain(tiny_llama(), partial(batch, sequences=8), partial(AdamW, lr=1e-2), steps=10)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.pool.device import DEVICE

M = TypeVar("M", bound=PreTrainedModel)
VOCAB = 64
SEQ = 16


def tiny_llama(
    tied: bool = False, layers: int = 3, hidden: int = 32, vocab: int = VOCAB, seed: int = 0, **config: Any
) -> LlamaForCausalLM:
    """Return a Llama of about 40,000 parameters in fp32 and training mode; `config` overrides LlamaConfig's fields."""
    fields: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden + 8,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
        "use_cache": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return _build(LlamaForCausalLM, LlamaConfig(**(fields | config)), seed)


def tiny_gpt2(
    tied: bool = True, layers: int = 3, hidden: int = 32, vocab: int = VOCAB, seed: int = 0, **config: Any
) -> GPT2LMHeadModel:
    """Return a GPT-2 (biases, LayerNorm, learned positions, Conv1D) without dropout, in fp32 and training mode."""
    fields: dict[str, Any] = {
        "vocab_size": vocab,
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": 4,
        "n_positions": 64,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": tied,
        "use_cache": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return _build(GPT2LMHeadModel, GPT2Config(**(fields | config)), seed)


def _build(kind: type[M], config: Any, seed: int) -> M:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config)
    model.train()
    return model


def batch(step: int, sequences: int = 8, seq: int = SEQ, vocab: int = VOCAB, seed: int = 0) -> Tensor:
    """Return the global batch of a step: token ids of shape (sequences, seq).

    Each token mostly follows from the previous one, so that a model can learn something.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    start = torch.randint(vocab, (sequences, 1), generator=generator)
    jumps = torch.randint(10, (sequences, seq), generator=generator)
    steps = torch.where(jumps == 0, jumps + 7, torch.full_like(jumps, 3))
    return ((start + steps.cumsum(1)) % vocab).to(DEVICE)


def share(ids: Tensor, rank: int, world: int, accumulation: int = 1) -> list[Tensor]:
    """Return this rank's microbatches of a global batch, which is split into `world * accumulation` equal parts.

    Raises:
        ValueError: the sequences cannot be split evenly.
    """
    parts = world * accumulation
    if ids.shape[0] % parts:
        raise ValueError(
            f"{ids.shape[0]} sequences do not divide into {world} ranks x {accumulation} micro-batches"
        )
    return list(ids.chunk(parts)[rank::world])


@dataclass(frozen=True)
class PlainRun:
    """The result of a run: one loss and one gradient norm (before clipping) per step, and the final weights.

    `weights` holds each parameter once, by its first name. With bf16 these are the fp32 master weights.
    """

    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, Tensor]


def train_plain(
    model: PreTrainedModel,
    batches: Callable[[int], Tensor],
    optimizer_factory: Callable[[Iterable[nn.Parameter]], Optimizer],
    steps: int,
    accumulation: int = 1,
    clip: float = 0.0,
    dtype: torch.dtype = torch.float32,
    schedule: Callable[[Optimizer], LRScheduler] | None = None,
) -> PlainRun:
    """Train in this process, without any code of the launcher.

    fp32: the ordinary loop. bf16: the optimizer holds fp32 master weights, which start as the given weights; forward
    and backward run on a bf16 copy of the parameters (buffers, such as rotary frequencies, keep their dtype); each
    microbatch's bf16 gradient is accumulated in fp32; norm, clipping and step are fp32.

    Args:
        model: modified in place.
        batches: step -> token ids of the global batch, shape (sequences, seq).
        optimizer_factory: parameters -> optimizer, such as `partial(torch.optim.AdamW, lr=1e-3)`.
        accumulation: microbatches that the global batch is split into; for N ranks use N times theirs.
        clip: the maximum gradient norm; 0 disables clipping.
        schedule: optimizer -> scheduler, stepped after every step.
    """
    model.to(DEVICE)
    names = dict(model.named_parameters())
    masters = {name: nn.Parameter(p.detach().float().clone(), p.requires_grad) for name, p in names.items()}
    if dtype == torch.float32:
        masters = names
    for p in names.values():
        if p.is_floating_point():  # otherwise packed bytes
            p.data = p.data.to(dtype)
    trainable = [p for p in masters.values() if p.requires_grad]
    optimizer = optimizer_factory(trainable)
    scheduler = schedule(optimizer) if schedule else None
    losses, norms = [], []
    for step in range(steps):
        loss = 0.0
        for ids in share(batches(step), 0, 1, accumulation):
            part = model(input_ids=ids, labels=ids).loss
            (part / accumulation).backward()
            loss += part.item() / accumulation
            _add_to_masters(names, masters)
        losses.append(loss)
        norms.append(nn.utils.clip_grad_norm_(trainable, clip or float("inf")).item())
        optimizer.step()
        optimizer.zero_grad()
        if scheduler:
            scheduler.step()
        _copy_masters_back(names, masters)
    return PlainRun(losses, norms, {name: p.detach().cpu().clone() for name, p in masters.items()})


def _add_to_masters(names: dict[str, nn.Parameter], masters: dict[str, nn.Parameter]) -> None:
    for name, p in names.items():
        master = masters[name]
        if master is not p and p.grad is not None:
            master.grad = p.grad.float() if master.grad is None else master.grad + p.grad.float()
            p.grad = None


@torch.no_grad()
def _copy_masters_back(names: dict[str, nn.Parameter], masters: dict[str, nn.Parameter]) -> None:
    for name, p in names.items():
        if masters[name] is not p:
            p.copy_(masters[name])
