"""Maps each tensor of Megatron-Core to parameters of a Hugging Face model, with the order of their rows.

Megatron-Core has one tensor for q, k and v, whose rows are ordered by group of heads (the q heads that share
a k head and a v head, then this k head, then this v head), and one for the gate and up projections, gate
first. Its torch_dist format stacks the tensors of all layers: `decoder.layers.mlp.linear_fc2.weight` is
[layers, hidden, ffn].
Source: megatron-core 0.16, `models/gpt/gpt_layer_specs.py` and `dist_checkpointing/`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from launcher.checkpoint.heads import AttentionHeads
from launcher.errors import CheckpointError, first_names

LAYERS = "decoder.layers."
_NORM_1 = ("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
_NORM_2 = ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
"""The name of a layer norm depends on its implementation: Transformer Engine's, or Megatron-Core's own."""


@dataclass(frozen=True)
class JoinRule:
    """Specifies how a Megatron tensor is assembled from parameters.

    Args:
        names: Megatron's names; reading uses the first one in the checkpoint, writing uses all.
        sources: names of the parameters whose rows are concatenated.
        by_head: its rows are ordered by group of heads.
        transposed: the model's matrices are transposed (transformers' Conv1D).
    """

    names: tuple[str, ...]
    sources: tuple[str, ...]
    by_head: bool = False
    transposed: bool = False


@dataclass(frozen=True)
class Family:
    """The rules for some model types.

    Args:
        layers: prefix of the layers.
        inner: rules within a layer; rules for parameters that a model lacks (biases) are skipped.
        outer: rules outside the layers.
    """

    layers: str
    inner: tuple[JoinRule, ...]
    outer: tuple[JoinRule, ...]


def _norm(names: tuple[str, ...], source: str) -> list[JoinRule]:
    return [
        JoinRule(tuple(f"{n}{kind}" for n in names), (f"{source}.{kind}",)) for kind in ("weight", "bias")
    ]


def _linear(name: str, *sources: str, by_head: bool = False, transposed: bool = False) -> list[JoinRule]:
    return [
        JoinRule((f"{name}.{kind}",), tuple(f"{s}.{kind}" for s in sources), by_head, transposed)
        for kind in ("weight", "bias")
    ]


LLAMA = Family(
    "model.layers.",
    (
        *_norm(_NORM_1, "input_layernorm"),
        *_linear(
            "self_attention.linear_qkv", *(f"self_attn.{n}_proj" for n in ("q", "k", "v")), by_head=True
        ),
        *_linear("self_attention.linear_proj", "self_attn.o_proj"),
        *_norm(("self_attention.q_layernorm.",), "self_attn.q_norm"),
        *_norm(("self_attention.k_layernorm.",), "self_attn.k_norm"),
        *_norm(_NORM_2, "post_attention_layernorm"),
        *_linear("mlp.linear_fc1", "mlp.gate_proj", "mlp.up_proj"),
        *_linear("mlp.linear_fc2", "mlp.down_proj"),
        *_linear("mlp.router", "mlp.gate"),
        # [layers, experts, ...]: gate and up of an expert are one parameter of the model, too
        JoinRule(("mlp.experts.experts.linear_fc1.weight",), ("mlp.experts.gate_up_proj",)),
        JoinRule(("mlp.experts.experts.linear_fc2.weight",), ("mlp.experts.down_proj",)),
    ),
    (
        JoinRule(("embedding.word_embeddings.weight",), ("model.embed_tokens.weight",)),
        *_norm(("decoder.final_layernorm.",), "model.norm"),
        JoinRule(("output_layer.weight",), ("lm_head.weight",)),
    ),
)
GPT2 = Family(
    "transformer.h.",
    (
        *_norm(_NORM_1, "ln_1"),
        *_linear("self_attention.linear_qkv", "attn.c_attn", by_head=True, transposed=True),
        *_linear("self_attention.linear_proj", "attn.c_proj", transposed=True),
        *_norm(_NORM_2, "ln_2"),
        *_linear("mlp.linear_fc1", "mlp.c_fc", transposed=True),
        *_linear("mlp.linear_fc2", "mlp.c_proj", transposed=True),
    ),
    (
        JoinRule(("embedding.word_embeddings.weight",), ("transformer.wte.weight",)),
        JoinRule(("embedding.position_embeddings.weight",), ("transformer.wpe.weight",)),
        *_norm(("decoder.final_layernorm.",), "transformer.ln_f"),
        JoinRule(("output_layer.weight",), ("lm_head.weight",)),
    ),
)
FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"), LLAMA),
    "gpt2": GPT2,
}
"""Model types of transformers that Megatron-Core's GPTModel can compute, and that were compared with it."""


@dataclass(frozen=True)
class MegatronTensor:
    """A Megatron tensor, or one layer of a stacked one.

    Args:
        names: names in a checkpoint, without the layer.
        layer: layer index; None: it belongs to no layer.
        shapes: name of a parameter -> its shape, in the order of the rows.
        order: for each row, its index in the concatenated parameters; None: the same order.
        transposed: see `JoinRule`.
    """

    names: tuple[str, ...]
    layer: int | None
    shapes: Mapping[str, tuple[int, ...]]
    order: Tensor | None
    transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape within a layer: [rows, ...], for experts [experts, rows, columns]."""
        shapes = [self._turned(shape) for shape in self.shapes.values()]
        first = shapes[0]
        return first if len(shapes) == 1 else (sum(shape[0] for shape in shapes), *first[1:])

    def key(self, name: str, *, stacked: bool) -> str:
        """Return the key of one of its names in a checkpoint. Layers that differ are not stacked."""
        if self.layer is None:
            return name
        return f"{LAYERS}{name}" if stacked else f"{LAYERS}{self.layer}.{name}"

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Assemble the tensor from the parameters."""
        turned = [part.t() if self._turns(part.shape) else part for part in parts]
        rows = turned[0] if len(turned) == 1 else torch.cat(turned)
        return rows.contiguous() if self.order is None else rows[self.order]

    def parts(self, whole: Tensor) -> dict[str, Tensor]:
        """Split the tensor into the parameters, by their names."""
        rows = whole
        if self.order is not None:
            rows = torch.empty_like(whole)
            rows[self.order] = whole
        if len(self.shapes) == 1:
            pieces: Sequence[Tensor] = [rows]
        else:
            pieces = rows.split([shape[0] for shape in self.shapes.values()])
        turned = [piece.t() if self._turns(piece.shape) else piece for piece in pieces]
        return dict(zip(self.shapes, turned, strict=True))

    def _turns(self, shape: Sequence[int]) -> bool:
        return self.transposed and len(shape) == 2

    def _turned(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[::-1] if self._turns(shape) else shape


def tensors_of(model: Any) -> list[MegatronTensor]:
    """Return Megatron's tensors for a transformers model, which may be on the meta device.

    Raises:
        CheckpointError: the model type is not supported, or a parameter has no counterpart in Megatron.
    """
    kind = str(model.config.model_type)
    if kind not in FAMILIES:
        raise CheckpointError(
            f"Model type {kind} is not supported for Megatron checkpoints.",
            where=f"--model, model_type {kind}",
            fix=f"supported model types: {', '.join(FAMILIES)}. Convert others through Hugging Face format with "
            "Megatron Bridge",
        )
    family = FAMILIES[kind]
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    made = [_made(model.config, shapes, rule, rule.sources, None) for rule in family.outer]
    for layer in range(model.config.num_hidden_layers):
        for rule in family.inner:
            sources = tuple(f"{family.layers}{layer}.{source}" for source in rule.sources)
            made.append(_made(model.config, shapes, rule, sources, layer))
    found = [one for one in made if one is not None]
    known = {name for one in found for name in one.shapes}
    if odd := [name for name in shapes if name not in known]:
        raise CheckpointError(
            f"{len(odd)} parameters of the model have no counterpart in Megatron: {first_names(odd)}.",
            where=f"--model, model_type {kind}",
            fix="export the weights in Hugging Face format: --format hf",
        )
    return found


def _made(
    config: Any,
    shapes: Mapping[str, tuple[int, ...]],
    rule: JoinRule,
    sources: Sequence[str],
    layer: int | None,
) -> MegatronTensor | None:
    there = {name: shapes[name] for name in sources if name in shapes}
    if len(there) != len(sources):  # if some of them exist, `tensors_of` reports them
        return None
    order = AttentionHeads.of(config).by_group() if rule.by_head else None
    return MegatronTensor(rule.names, layer, there, order, rule.transposed)
