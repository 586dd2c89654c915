"""Our own plans, by model type: for models that have none in transformers, and where theirs can be bettered. Data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """How one module or parameter is split.

    Args:
        style: a key of launcher.tensor.styles.STYLES.
        packed: proportions of the matrices that lie end to end along the split dim; each is split by itself. A string
            names a number of the model's config.
        divide: attributes of the module that count what is split (heads, features): divided by the degree.
    """

    style: str
    packed: tuple[int | str, ...] = (1,)
    divide: tuple[str, ...] = ()


# name pattern -> a style's name, or a rule where the style needs to know more
Plan = Mapping[str, str | Rule]

_PARTIAL = "replicated_with_grad_allreduce"
_INKLING: Plan = {
    "model.layers.*.mlp.experts.gate_up_proj": "packed_colwise",
    "model.layers.*.mlp.shared_experts": "moe_tp_experts",
}

# Over the rows that transformers has for the type, if any.
PLANS: dict[str, Plan] = {
    "apertus": {"model.layers.*.mlp.act_fn": _PARTIAL},
    "doge": {
        "model.layers.*.self_attn.A": "colwise",
        "model.layers.*.self_attn.q_norm": _PARTIAL,
        "model.layers.*.self_attn.k_norm": _PARTIAL,
        "model.layers.*.self_attn.dt_proj": "rowwise_slice_output",
    },
    # keeps the largest activations of a whole layer: needs all of them
    "gemma3n_text": {
        "model.layers.*.mlp.gate_proj": "colwise_gather_output",
        "model.layers.*.mlp.up_proj": "colwise_gather_output",
        "model.layers.*.mlp.down_proj": "rowwise_split_input",
    },
    "inkling_text": {**_INKLING, "model.embed_tokens.embed_norm": _PARTIAL},
    "inkling2_text": _INKLING,
}

# Types whose blocks do more with whole sequences than their parts do, and what.
_STREAMS = "their blocks mix several residual streams (hyper-connections)"
_PER_LAYER = "their blocks add an embedding of each token that belongs to the layer"
WITHOUT_SEQUENCE: dict[str, str] = {
    "deepseek_v4": _STREAMS,
    "hy_v4": _STREAMS,
    "qwen4_exp_text": _STREAMS,
    "gemma3n_text": _PER_LAYER,
    "gemma4_text": _PER_LAYER,
    "hrm_text": "its blocks run several times, each time with another state added",
    "inkling2_text": "its blocks look back at the outputs of earlier ones",
}
