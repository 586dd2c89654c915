"""`deepspeed.sequence.layer`: Ulysses around a script's own attention, for models that get sequence shards.

Source: Jacobs et al. 2023, arXiv:2309.14509."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from launcher.comm import Axis
from launcher.errors import ArgumentsError
from launcher.sequence.ulysses import Heads, to_heads, to_tokens

WHERE = "DistributedAttention"


class DistributedAttention(nn.Module):
    """Ulysses attention from this rank's tokens to the tokens of all ranks of a group.

    Args:
        local_attention: called with query, key and value of all tokens and a subset of the heads.
        sequence_process_group: the ranks that share a sequence.
        scatter_idx, gather_idx: the head dimension and the sequence dimension.
        sp_stream, num_kv_heads: unused.
    """

    def __init__(
        self,
        local_attention: Any,
        sequence_process_group: Any,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
        num_kv_heads: int | None = None,
    ) -> None:
        super().__init__()
        self.local_attn, self.spg = local_attention, sequence_process_group
        self.scatter_idx, self.gather_idx = scatter_idx, gather_idx

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch_dim_idx: int,
        rotary_pos_emb: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Return the attention output of this rank's tokens, with the dimensions of the query.

        Args:
            query, key, value: this rank's tokens and all heads, in dimensions `gather_idx` and `scatter_idx`.
            batch_dim_idx: the batch dimension.
            rotary_pos_emb: must be None; rotate queries and keys before the call.
            args, kwargs: passed to the local attention.
        """
        if rotary_pos_emb is not None:
            raise ArgumentsError(
                "rotary_pos_emb is not supported",
                where=WHERE,
                fix="rotate queries and keys before the call",
            )
        heads, groups, ranks = query.shape[self.scatter_idx], key.shape[self.scatter_idx], self.spg.size()
        if groups != heads and (groups % ranks or heads % ranks):
            raise ArgumentsError(
                f"{heads} query heads and {groups} key heads cannot be split evenly over {ranks} ranks",
                where=WHERE,
                fix="repeat the key heads, one for each query head, before the call",
            )
        dims = self.scatter_idx, self.gather_idx
        whole = [single_all_to_all(x, *dims, batch_dim_idx, self.spg) for x in (query, key, value)]
        context = self.local_attn(*whole, *args, **kwargs)
        return single_all_to_all(context, *reversed(dims), batch_dim_idx, self.spg, heads=heads)


def single_all_to_all(
    input: Tensor,
    scatter_idx: int,
    gather_idx: int,
    batch_dim_idx: int,
    group: Any,
    *unused: Any,
    heads: int | None = None,
) -> Tensor:
    """Scatter heads and gather tokens if `scatter_idx` > `gather_idx` (the head dimension); else the reverse.

    Args:
        input: [..., heads, width]; the sequence and batch dimensions come first.
        group: the ranks that share a sequence.
        heads: total number of heads when heads are gathered; default: the sum over the ranks.
    """
    axis = Axis.over("cp", group)
    to_all_tokens = scatter_idx > gather_idx
    heads_dim, tokens_dim = (scatter_idx, gather_idx) if to_all_tokens else (gather_idx, scatter_idx)
    order = [batch_dim_idx, heads_dim, tokens_dim]
    shape = input.shape
    flat = input.flatten(max(order) + 1) if input.dim() > max(order) + 1 else input.unsqueeze(-1)
    x = flat.movedim(order, (0, 1, 2))
    if to_all_tokens:
        x = to_heads(x, axis, shards(x.shape[1], axis.degree))
    else:
        x = to_tokens(x, axis, shards(heads or _heads_of_all(x.shape[1], axis), axis.degree))
    out = x.movedim((0, 1, 2), order).contiguous()
    sizes = list(shape)
    sizes[heads_dim], sizes[tokens_dim] = x.shape[1], x.shape[2]
    return out.view(sizes)


def shards(heads: int, ranks: int) -> Heads:
    """Return the heads of each rank; the first ranks get one more if they do not divide evenly."""
    size, more = divmod(heads, ranks)
    stops = [size * (rank + 1) + min(rank + 1, more) for rank in range(ranks)]
    return tuple(slice(start, stop) for start, stop in zip([0, *stops], stops, strict=False))


def _heads_of_all(mine: int, axis: Axis) -> int:
    from launcher.comm.plain import gather_plain

    return sum(gather_plain(mine, axis.group))


class _SeqAllToAll:
    """`single_all_to_all` with the argument order of DeepSpeed's autograd function."""

    @staticmethod
    def apply(
        group: Any, input: Tensor, scatter_idx: int, gather_idx: int, batch_dim_idx: int, *unused: Any
    ) -> Tensor:
        return single_all_to_all(input, scatter_idx, gather_idx, batch_dim_idx, group)
