"""`deepspeed.sequence.fpdt_layer`: chunked computation over long sequences, as used by Megatron-DeepSpeed.

`FPDT_Attention`, `FPDT_FFN`, `FPDT_LogitsLoss` and `FPDT_InputConstruct`. Tensors are [sequence, batch, ...].
The forward of an MLP or loss chunk is recomputed in its backward. Source: Yao et al. 2024, arXiv:2408.16978.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from launcher.comm import Axis
from launcher.errors import ArgumentsError
from launcher.integrations.distributed_attention import single_all_to_all
from launcher.tensor.functions import gather_along


class FPDT_Attention(torch.nn.Module):
    """Causal attention over a sequence sharded across ranks, including the QKV and output projections.

    Args:
        config: provides `kv_channels` (the head width), `num_attention_heads`, `num_key_value_heads` and
            `attention_dropout`.
        first_weight, first_bias: of the projection to queries, keys and values, concatenated in this order.
        second_weight, second_bias: of the output projection.
        sequence_process_group: ranks that share the sequence; each computes a subset of the heads.
        gather_idx, scatter_idx, enable_offloading: unused; keys and values stay on the device.
        return_bias: return the second bias instead of adding it.
        chunk_size: tokens per chunk, over all ranks.
    """

    def __init__(
        self,
        config: Any,
        first_weight: Tensor,
        first_bias: Tensor | None,
        second_weight: Tensor,
        second_bias: Tensor | None,
        sequence_process_group: dist.ProcessGroup | None,
        gather_idx: int = 0,
        scatter_idx: int = 2,
        return_bias: bool = True,
        chunk_size: int = 65536,
        enable_offloading: bool = True,
    ) -> None:
        super().__init__()
        self.spg, self.chunk_size, self.return_bias = sequence_process_group, chunk_size, return_bias
        self.head_dim, self.dropout = config.kv_channels, config.attention_dropout
        self.widths = [
            self.head_dim * config.num_attention_heads,
            *2 * [self.head_dim * config.num_key_value_heads],
        ]
        self.qkv_linear_weight, self.qkv_linear_bias = first_weight, first_bias
        self.qkv_dense_weight, self.qkv_dense_bias = second_weight, second_bias
        ranks = dist.get_world_size(sequence_process_group)
        if config.num_attention_heads % ranks or config.num_key_value_heads % ranks:
            heads = f"{config.num_attention_heads} query heads and {config.num_key_value_heads} key heads"
            raise ArgumentsError(
                f"{heads} cannot be split evenly over {ranks} ranks",
                where="FPDT_Attention",
                fix='use a number of ranks that divides both, or "context_parallel": {"ring": N} in the JSON',
            )

    def forward(
        self,
        layernorm_output: Tensor,
        attention_mask: None,
        inference_params: Any,
        rotary_pos_emb: tuple[Tensor, Tensor] | None,
        cpu_offloading: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output, [sequence of this rank, batch, hidden], and the second bias if it was not added.

        Args:
            layernorm_output: [sequence of this rank, batch, hidden]; contains a piece of every chunk, as
                partitioned by `FPDT_InputConstruct`.
            attention_mask: must be None; attention is causal.
            inference_params, cpu_offloading: unused.
            rotary_pos_emb: (cos, sin) of all tokens, each [sequence of all ranks, 1, 1, width].
        """
        x, ranks = layernorm_output, dist.get_world_size(self.spg)
        chunks, rest = divmod(x.shape[0] * ranks, self.chunk_size)
        if attention_mask is not None or chunks < 1 or rest or x.shape[0] % chunks:
            what = f"{x.shape[0]} tokens per rank on {ranks} ranks in chunks of {self.chunk_size}, or a mask,"
            raise _uneven(f"{what} are not supported", "FPDT_Attention")
        split = functional.linear(x, self.qkv_linear_weight, self.qkv_linear_bias).split(self.widths, dim=-1)
        # A chunk is its ranks' pieces in rank order, so gathering chunk by chunk keeps the token order.
        query, key, value = (
            torch.cat(
                [self._exchanged(piece, 2, 1) for piece in one.transpose(0, 1).chunk(chunks, dim=1)], dim=1
            )
            for one in (part.unflatten(-1, (-1, self.head_dim)) for part in split)
        )  # each [batch, sequence of all ranks, heads of this rank, width]
        if rotary_pos_emb is not None:
            cos, sin = (one.transpose(0, 1) for one in rotary_pos_emb)
            query, key = _rotated(query, cos, sin), _rotated(key, cos, sin)
        query, key, value = (one.transpose(1, 2) for one in (query, key, value))
        rate = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=rate, is_causal=True, enable_gqa=True
        ).transpose(1, 2)
        mine = torch.cat([self._exchanged(chunk, 1, 2) for chunk in mixed.chunk(chunks, dim=1)], dim=1)
        bias = None if self.return_bias else self.qkv_dense_bias
        out = functional.linear(mine.flatten(2).transpose(0, 1), self.qkv_dense_weight, bias)
        return out, self.qkv_dense_bias if self.return_bias else None

    def _exchanged(self, x: Tensor, scatter: int, gather: int) -> Tensor:
        return single_all_to_all(x, scatter, gather, 0, self.spg)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x with rotary embeddings applied to its first `rotated` elements.

    Args:
        x: [batch, sequence, heads, width].
        cos, sin: [1, sequence, 1, rotated].
    """
    turned, kept = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    return torch.cat((turned * cos + torch.cat((-second, first), dim=-1) * sin, kept), dim=-1)


class FPDT_FFN:
    """Two linear layers with a GELU in between, computed in chunks of the sequence."""

    @staticmethod
    def apply(
        x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, add_bias: bool, chunk_size: int
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output, and the second bias if it was not added.

        Args:
            x: [sequence, batch, hidden].
            w1, b1, w2, b2: weights [out, in] and biases [out] of the two layers.
            add_bias: add the second bias to the output.
            chunk_size: tokens per chunk; must divide the sequence length.
        """
        if chunk_size < 1 or x.shape[0] % chunk_size:
            raise _uneven(
                f"{x.shape[0]} tokens cannot be split evenly into chunks of {chunk_size}", "FPDT_FFN.apply()"
            )
        weights = [one.float() for one in (w1, b1, w2, *([b2] if add_bias else []))]
        out = [_again(_feed_forward, chunk, *weights) for chunk in x.split(chunk_size)]
        return torch.cat(out), None if add_bias else b2


def _feed_forward(x: Tensor, *weights: Tensor) -> Tensor:
    w1, b1, w2, *b2 = (one.to(x.dtype) for one in weights)
    inner = functional.gelu(functional.linear(x, w1, b1), approximate="tanh")
    return functional.linear(inner, w2, *b2)


class FPDT_LogitsLoss:
    """Logits and their cross-entropy, computed in chunks of the sequence."""

    @staticmethod
    def apply(
        lm_output: Tensor,
        labels: Tensor,
        logit_weights: Tensor,
        rank: int,
        spg_size: int,
        spg: dist.ProcessGroup | None,
        num_chunk: int,
    ) -> Tensor:
        """Return the per-token losses of all ranks, [sequence of all ranks, batch], fp32.

        Args:
            lm_output: [sequence of this rank, batch, hidden].
            labels: [batch, sequence of this rank].
            logit_weights: [vocabulary, hidden].
            rank, spg_size: rank in the group, and the size of the group.
            spg: ranks that share the sequence.
            num_chunk: number of chunks; must divide the sequence length of this rank.
        """
        tokens = lm_output.shape[0]
        if num_chunk < 1 or tokens % num_chunk:
            raise _uneven(
                f"{tokens} tokens cannot be split into {num_chunk} equal chunks", "FPDT_LogitsLoss.apply()"
            )
        weights = logit_weights.float()
        chunks = zip(lm_output.chunk(num_chunk), labels.t().chunk(num_chunk), strict=True)
        losses = torch.cat([_again(_token_losses, x, of_x, weights) for x, of_x in chunks])
        return losses if spg_size == 1 else gather_along(losses, Axis.over("cp", spg), 0, "losses")


def _token_losses(x: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    logits = functional.linear(x, weights.to(x.dtype)).float()
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(
        labels.shape
    )


class FPDT_InputConstruct(torch.nn.Module):
    """Partitions the tokens of a batch: each rank gets a piece of every chunk.

    Args:
        tokens: [batch, sequence of all ranks].
        labels, loss_mask, position_ids: same shape as `tokens`, or None.
        attention_mask: passed through unchanged.
        args: provides `ds_sequence_parallel_fpdt_chunk_size`, the tokens per chunk over all ranks.
        sp_size, sp_rank: number of ranks that share the sequence, and the index of this rank.
    """

    def __init__(
        self,
        tokens: Tensor,
        labels: Tensor | None,
        loss_mask: Tensor | None,
        attention_mask: Any,
        position_ids: Tensor | None,
        args: Any,
        sp_size: int,
        sp_rank: int,
    ) -> None:
        super().__init__()
        length, chunk = tokens.shape[1], args.ds_sequence_parallel_fpdt_chunk_size
        if chunk < 1 or length % chunk or chunk % sp_size:
            what = f"{length} tokens in chunks of {chunk} cannot be split evenly over {sp_size} ranks"
            raise _uneven(what, "FPDT_InputConstruct")
        self.tokens, self.labels, self.position_ids = tokens, labels, position_ids
        self.loss_mask, self.attention_mask = loss_mask, attention_mask
        self.sp_rank = sp_rank
        pieces = torch.arange(tokens.shape[1], device=tokens.device).view(-1, sp_size, chunk // sp_size)
        self.order = pieces.transpose(0, 1)  # [ranks, chunks, tokens of a piece]

    def generate(self) -> tuple[Tensor, Tensor | None, Tensor | None, Any, Tensor | None]:
        """Return this rank's tokens and labels, the loss mask of all ranks in rank order, the attention mask,
        and this rank's position ids."""
        of_all, mine = self.order.flatten(), self.order[self.sp_rank].flatten()
        tokens, labels, positions = (
            None if one is None else one[:, mine] for one in (self.tokens, self.labels, self.position_ids)
        )
        assert tokens is not None
        loss_mask = None if self.loss_mask is None else self.loss_mask[:, of_all]
        return tokens, labels, loss_mask, self.attention_mask, positions


def _again(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """Run a function that draws no random numbers, and recompute it in the backward.

    Weights are passed in fp32: their gradients are accumulated over the chunks in fp32 and rounded once.
    """
    made: Tensor = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return made


def _uneven(what: str, where: str) -> ArgumentsError:
    return ArgumentsError(what, where=where, fix="choose sizes that divide the sequence length")
