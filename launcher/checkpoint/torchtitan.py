"""Reads torchtitan checkpoints under the parameter names of a Hugging Face model.

torchtitan saves with torch.distributed.checkpoint, under its own names. The rotary embedding of its Llama
pairs adjacent rows of a head of q and k (0 and 1, 2 and 3, ...), while transformers pairs row i with row i +
half. The rows of these weights, and of their Adam moments, are therefore in another order. Its Qwen 3 has the
same order as transformers. If q, k and v are one parameter, as by default in 0.3, its rows are ordered by
group of heads; 0.3 saves the weights of q, k and v separately, but their moments as one tensor.
Source: torchtitan 0.1 to 0.3, `models/*/state_dict_adapter.py` and `models/common/attention.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from launcher.checkpoint.heads import AttentionHeads
from launcher.checkpoint.hub_model import check_model
from launcher.checkpoint.names import TORCHTITAN
from launcher.checkpoint.slices import FlatSlice, fill
from launcher.checkpoint.source import SourceCheckpoint
from launcher.errors import CheckpointError
from launcher.models.build import build_on_meta, load_config
from launcher.models.names import ties_of
from launcher.models.settings import settings_of

logger = logging.getLogger("launcher")

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
"""Model type of transformers -> whether torchtitan's rotary embedding pairs adjacent rows."""
_FUSED = "attention.qkv_linear.wqkv"
_COMPUTED = "freqs_cis"
"""The table of rotary angles, which early versions saved with the weights."""


def under_names_of(stored: SourceCheckpoint, model: str) -> SourceCheckpoint:
    """Return a torchtitan checkpoint under the parameter names of a model, with rows in transformers' order.

    Args:
        model: the model that was trained: a directory with config.json, or a name.

    Raises:
        CheckpointError: the model type is not supported, or the checkpoint is of another model.
    """
    made: Any = build_on_meta(load_config(model))
    kind = str(made.config.model_type)
    if kind not in _TURNS_NEIGHBOURS:
        raise CheckpointError(
            f"Model type {kind} is not supported for torchtitan checkpoints.",
            where=f"--model, model_type {kind}",
            fix=f"supported model types: {', '.join(_TURNS_NEIGHBOURS)}. For others, save in Hugging Face format from "
            "torchtitan (--checkpoint.last_save_in_hf)",
        )
    heads = AttentionHeads.of(made.config)
    settings = settings_of(made)  # including the heads, which must be the same on loading
    sources = _sources(stored, heads, _TURNS_NEIGHBOURS[kind])
    ties = ties_of(made)
    check_model(_under(stored, sources, ties, settings), made, model)
    logger.warning(
        "reading the rows of q, k and v as %s, from the config of %s: torchtitan does not record them",
        heads,
        model,
    )
    once = {key: source for key, source in sources.items() if _parted(key)[1] not in ties}
    for key, source in sources.items():  # the state of a tied parameter may be under its other name
        kind, name = _parted(key)
        once.setdefault(f"{kind}/{ties.get(name, name)}", source)
    return _under(stored, once, ties, settings)


@dataclass(frozen=True)
class _Source:
    """The source of a tensor.

    Args:
        key: key in the checkpoint.
        rows: indices of the rows to take from that tensor; None: all of them, in stored order.
    """

    key: str
    rows: Tensor | None


def _rows(name: str, heads: AttentionHeads, *, fused: bool, turned: bool) -> Tensor | None:
    """Return the rows of torchtitan's tensor that a parameter has, in its order; None: all, in stored order.

    Args:
        turned: see `_TURNS_NEIGHBOURS`.
    """
    kind = name.split(".")[-2].removesuffix("_proj")
    if kind not in "qkv":
        return None
    rows = heads.places(kind) if fused else torch.arange(heads.count(kind))
    return heads.from_neighbours(rows) if turned and kind != "v" else rows


def _sources(stored: SourceCheckpoint, heads: AttentionHeads, turned: bool) -> dict[str, _Source]:
    """Return {launcher's name: source of the tensor}.

    Unknown tensors keep their names; `check_model` then reports that the model does not have them.

    Raises:
        CheckpointError: two tensors have the same name in launcher.
    """
    found: dict[str, _Source] = {}
    for key, entry in stored.entries.items():
        prefix, own = _parted(key)
        if own == _COMPUTED:
            continue
        fused = _FUSED in own and (not entry.size or entry.size[0] == heads.rows)
        for name in _renamed(own) if fused or _FUSED not in own else [own]:
            moved = entry.size and name != own
            rows = _rows(name, heads, fused=fused, turned=turned) if moved else None
            ours = f"{prefix}/{name}"
            if ours in found:
                raise CheckpointError(
                    f"{stored.path} has {ours} twice: as {found[ours].key} and as {key}.",
                    where=str(stored.path),
                    fix="save only what torchtitan saves, without other tensors under the model's names",
                )
            found[ours] = _Source(key, rows)
    return found


def _parted(key: str) -> tuple[str, str]:
    """Split a key into ("model", or e.g. "optimizer/exp_avg"; name of the parameter)."""
    prefix, _, rest = key.partition("/")
    if prefix == "model":
        return prefix, rest
    kind, _, name = rest.partition("/")
    return f"{prefix}/{kind}", name


def _renamed(name: str) -> list[str]:
    """Return transformers' names for a parameter: three if q, k and v are fused."""
    module, _, kind = name.rpartition(".")
    if not module.startswith("layers."):
        return [f"{_OUTER.get(module, module)}.{kind}"]
    _, layer, inner = (*module.split(".", 2), "", "")[:3]
    names = [f"self_attn.{part}_proj" for part in "qkv"] if inner == _FUSED else [_INNER.get(inner, inner)]
    return [f"model.layers.{layer}.{one}.{kind}" for one in names]


def _under(
    stored: SourceCheckpoint,
    sources: Mapping[str, _Source],
    ties: dict[str, str],
    settings: dict[str, Any] | None,
) -> SourceCheckpoint:
    entries = {}
    for name, source in sources.items():
        entry = stored.entries[source.key]
        size = entry.size
        if source.rows is not None and _FUSED in source.key:
            size = torch.Size((len(source.rows), *size[1:]))
        entries[name] = replace(entry, size=size)
    meta = {**stored.meta, "model": settings, "tied": ties, "writer": TORCHTITAN}
    if meta["optimizer"] is not None:
        groups = [[name for own in group for name in _renamed(own)] for group in meta["optimizer"]["names"]]
        names = [list(dict.fromkeys(ties.get(name, name) for name in group)) for group in groups]
        meta["optimizer"] = {**meta["optimizer"], "names": names}
    # Cache the last fused tensor: q, k and v are read from it one by one.
    fused = lru_cache(maxsize=1)(stored.tensor)

    def read(tensors: Mapping[str, Tensor | FlatSlice]) -> None:
        for name, tensor in tensors.items():
            source = sources[name]
            whole = (fused if _FUSED in source.key else stored.tensor)(source.key)
            fill(tensor, whole if source.rows is None else whole[source.rows])

    return SourceCheckpoint(stored.path, stored.tag, meta, entries, read)
