"""Registers context-parallel attention with Hugging Face: the attention function and the mask function.

transformers looks up both by the name in each model's config (`AttentionInterface`). Ours are registered
under a name that only the configs of models with sharded sequences contain. A forward over full sequences
(generation) falls back to the model's original functions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from launcher.comm import Axis
from launcher.sequence.inputs import current, refused
from launcher.sequence.kernels import Scores
from launcher.sequence.masks import AttentionMask
from launcher.sequence.ring import RingCall, ring_attention
from launcher.sequence.ulysses import key_heads, out_to_tokens, query_heads, to_heads

NAME = "launcher_context_parallel"


@dataclass(frozen=True, eq=False)
class SharedAttention:
    """The attention of one model.

    Args:
        ring, ulysses: axes inside cp.
        before: the model's original `attn_implementation`.
    """

    ring: Axis
    ulysses: Axis
    before: str

    def install(self, config: Any) -> None:
        """Make every layer with this config use this attention."""
        AttentionInterface.register(NAME, attention)
        AttentionMaskInterface.register(NAME, mask)
        _shared[id(config)] = self
        config._attn_implementation = NAME

    def remove(self, config: Any) -> None:
        """Restore the original attention of the layers."""
        if _shared.get(id(config)) is self:
            del _shared[id(config)]
            config._attn_implementation = self.before


_shared: WeakValueDictionary[int, SharedAttention] = WeakValueDictionary()
"""id of a config -> the attention of its model."""


def mask(*args: Any, mask_function: Callable[..., Any], config: Any, **keywords: Any) -> Any:
    """Return the mask of a layer: an `AttentionMask` in a forward over sharded sequences."""
    sequence = current.get()
    if sequence is not None:
        return sequence.mask(mask_function)
    own = ALL_MASK_ATTENTION_FUNCTIONS[_before(config)]
    return own(*args, mask_function=mask_function, config=config, **keywords)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **keywords: Any,
) -> tuple[Tensor, Any]:
    """Return the attention of this rank's tokens to the tokens of all ranks, in transformers' layout.

    Args:
        query: [B, H, S / degree, D]; key and value: [B, G, S / degree, D].
        attention_mask: an `AttentionMask`.

    Returns:
        ([B, S / degree, H, D], None).
    """
    if not isinstance(attention_mask, AttentionMask):
        if current.get() is not None:
            raise refused(module, "passes a custom attention mask, or no mask, to its attention")
        own = _attention_before(module, _before(module.config))
        found: tuple[Tensor, Any] = own(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **keywords
        )
        return found
    if dropout:
        raise refused(module, f"applies attention dropout ({dropout})")
    if keywords.get("position_bias") is not None:
        raise refused(module, "adds a position bias to its attention scores")
    scores = Scores(
        query.shape[-1] ** -0.5 if scaling is None else float(scaling), float(keywords.get("softcap") or 0.0)
    )
    out = _over_ranks(
        _shared[id(module.config)], module, (query, key, value), keywords.get("s_aux"), attention_mask, scores
    )
    return out, None


def _over_ranks(
    shared: SharedAttention,
    module: nn.Module,
    tensors: tuple[Tensor, Tensor, Tensor],
    sinks: Tensor | None,
    rules: AttentionMask,
    scores: Scores,
) -> Tensor:
    """Compute attention across the ranks: [B, heads, S / degree, D] -> [B, S / degree, H, E]."""
    query, key, value = tensors
    axis, sequence = shared.ulysses, rules.sequence
    heads, groups = query.shape[1], key.shape[1]
    if heads % axis.degree:
        raise refused(
            module,
            f"has {heads} attention heads per rank, which cannot be split evenly over {axis.degree} Ulysses ranks",
        )
    of_queries, of_keys = query_heads(heads, axis.degree), key_heads(heads, groups, axis.degree)
    if of_keys is None:
        key, value = (x.repeat_interleave(heads // groups, 1) for x in (key, value))
        of_keys = of_queries
    query = to_heads(query, axis, of_queries)
    key, value = to_heads(key, axis, of_keys), to_heads(value, axis, of_keys)
    if sinks is not None:
        sinks = sinks[of_queries[axis.rank]]
    call = RingCall(shared.ring, sequence.layout, sequence.padded, rules, scores)
    return out_to_tokens(*ring_attention(query, key, value, sinks, call), axis, of_queries)


def _before(config: Any) -> str:
    """Return the model's original attention; "sdpa" for a copy of its config, which is not registered."""
    shared = _shared.get(id(config))
    return "sdpa" if shared is None else shared.before


def _attention_before(module: nn.Module, name: str) -> Callable[..., Any]:
    eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    found: Callable[..., Any] = eager if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
    return found
