"""Checkpoints of torchtitan under the names of a Hugging Face model.

torchtitan saves with torch.distributed.checkpoint, under names of its own. Its Llama turns neighbouring rows of a head
of q and k together (0 and 1, 2 and 3, ...), where transformers turns row i and row i + half; so the rows, and those of
Adam's moments, lie in another order. Its Qwen 3 has them as transformers does.
Source: torchtitan 0.1 to 0.3, `models/*/state_dict_adapter.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from launcher.checkpoint.hub_model import check_model, ties_of
from launcher.checkpoint.slices import FlatSlice
from launcher.checkpoint.source import SourceCheckpoint
from launcher.errors import CheckpointError
from launcher.models.build import build_on_meta, load_config

_OUTER = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "lm_head": "lm_head",
    "output": "lm_head",  # until 0.2
}
_INNER = {
    **{f"attention.qkv_linear.w{kind}": f"self_attn.{kind}_proj" for kind in "qkv"},
    **{f"attention.w{kind}": f"self_attn.{kind}_proj" for kind in "qkv"},  # until 0.2
    **{f"attention.{kind}_norm": f"self_attn.{kind}_norm" for kind in "qk"},
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_TURNS_NEIGHBOURS = {"llama": True, "qwen3": False}
"""Model type of transformers -> whether torchtitan's rotary embedding turns neighbouring rows together."""
Order = Callable[[str], Tensor | None]
"""Name of a parameter -> torchtitan's row that is in each of its rows; None: they lie as they do there."""
_COMPUTED = "freqs_cis"
"""A table of angles, which early versions saved with the weights."""


def is_torchtitan(stored: SourceCheckpoint) -> bool:
    """Return whether a checkpoint has torchtitan's names."""
    return "tok_embeddings.weight" in stored.shapes and any(".attention.w" in name for name in stored.shapes)


def under_names_of(stored: SourceCheckpoint, model: str) -> SourceCheckpoint:
    """Return a checkpoint of torchtitan under the names of a model, its rows in transformers' order.

    Args:
        model: that was trained: a directory with config.json, or a name.

    Raises:
        CheckpointError: the model's type is not known under torchtitan's names, or it is another model.
    """
    made: Any = build_on_meta(load_config(model))
    kind = str(made.config.model_type)
    if kind not in _TURNS_NEIGHBOURS:
        raise CheckpointError(
            f"A model of the type {kind} is not known under torchtitan's names.",
            where=f"--model, model_type {kind}",
            fix=f"these are: {', '.join(_TURNS_NEIGHBOURS)}. torchtitan writes others as models of the Hub "
            "(--checkpoint.last_save_in_hf)",
        )
    names: dict[str, str] = {}
    for own in stored.shapes:
        if own != _COMPUTED:  # what is there twice keeps its name, and is told as none of the model's
            names[own if _renamed(own) in names else _renamed(own)] = own
    order = _orders(made.config) if _TURNS_NEIGHBOURS[kind] else _as_they_are
    check_model(_under(stored, names, order, made), made, model)
    once = {name: own for name, own in names.items() if name not in ties_of(made)}
    return _under(stored, once, order, made)


def _under(stored: SourceCheckpoint, names: Mapping[str, str], order: Order, model: Any) -> SourceCheckpoint:
    of = {
        f"{prefix}/{name}": f"{prefix}/{own}"
        for name, own in names.items()
        for prefix in ("model", *stored.states, "scalar/step")
        if f"{prefix}/{own}" in stored.entries
    }
    entries = {name: stored.entries[own] for name, own in of.items()}
    read = partial(_read, stored, of, order)
    return SourceCheckpoint(stored.path, stored.tag, _meta(stored, names, ties_of(model)), entries, read)


def _renamed(name: str) -> str:
    """Return transformers' name of a parameter; one that is not known stays, and is told as none of the model's."""
    module, _, kind = name.rpartition(".")
    if not module.startswith("layers."):
        return f"{_OUTER.get(module, module)}.{kind}"
    _, layer, inner = module.split(".", 2)
    return f"model.layers.{layer}.{_INNER.get(inner, inner)}.{kind}"


def _as_they_are(name: str) -> None:
    return None


def _orders(config: Any) -> Order:
    """Return the order of the rows of each parameter, for a model of these heads."""
    heads = int(config.num_attention_heads)
    width = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    groups = int(getattr(config, "num_key_value_heads", None) or heads)
    count = {"q_proj": heads, "k_proj": groups}

    def order(name: str) -> Tensor | None:
        number = count.get(name.split(".")[-2])
        if number is None:
            return None
        rows = torch.arange(number * width).view(number, width // 2, 2)
        return rows.transpose(1, 2).reshape(-1)

    return order


def _read(
    stored: SourceCheckpoint,
    of: Mapping[str, str],
    order: Order,
    tensors: Mapping[str, Tensor | FlatSlice],
) -> None:
    """Fill whole tensors, or flat slices of them, by launcher's names."""
    for name, tensor in tensors.items():
        whole = stored.tensor(of[name])
        rows = order(name) if whole.dim() else None
        if rows is not None:
            whole = whole[rows]
        if isinstance(tensor, FlatSlice):
            tensor.data_1d.copy_(whole.reshape(-1)[tensor.start : tensor.stop])
        else:
            tensor.copy_(whole)


def _meta(stored: SourceCheckpoint, names: Mapping[str, str], ties: dict[str, str]) -> dict[str, Any]:
    """Return the meta, with the names of the model."""
    ours = {own: name for name, own in names.items()}
    optimizer = stored.meta["optimizer"]
    if optimizer is not None:
        groups = [[ours[own] for own in group if own in ours] for group in stored.groups]
        optimizer = {**optimizer, "names": groups}
    return {**stored.meta, "optimizer": optimizer, "tied": ties, "writer": "torchtitan"}
