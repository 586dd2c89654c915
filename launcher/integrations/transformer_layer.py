"""`DeepSpeedTransformerLayer`: a BERT layer with DeepSpeed's parameter names, built from torch operators."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from launcher.errors import ArgumentsError


@dataclass(eq=False)
class DeepSpeedTransformerConfig:
    """The sizes and options of a layer.

    Args:
        intermediate_size: width of the MLP; below 1: four times the hidden size.
        heads: number of attention heads.
        attn_dropout_ratio, hidden_dropout_ratio: dropout probabilities; below 0: no dropout.
        initializer_range: standard deviation of new weights.
        adjust_init_range: divide it by sqrt(2 layers) for the weights of layers whose output is added to the
            residual.
        pre_layer_norm: normalize the inputs of attention and MLP; false: the outputs, as BERT does.
        return_tuple: the layer returns a tuple of one.
        others: options of DeepSpeed's kernels; they do not affect the results.
    """

    batch_size: int = -1
    hidden_size: int = -1
    intermediate_size: int = -1
    heads: int = -1
    attn_dropout_ratio: float = -1
    hidden_dropout_ratio: float = -1
    num_hidden_layers: int = -1
    initializer_range: float = -1
    layer_norm_eps: float = 1e-12
    local_rank: int = -1
    seed: int = -1
    fp16: bool = False
    pre_layer_norm: bool = True
    normalize_invertible: bool = False
    gelu_checkpoint: bool = False
    adjust_init_range: bool = True
    attn_dropout_checkpoint: bool = False
    stochastic_mode: bool = False
    return_tuple: bool = False
    training: bool = True
    layer_id: int = -1

    def __post_init__(self) -> None:
        if self.intermediate_size < 1 <= self.hidden_size:
            self.intermediate_size = 4 * self.hidden_size

    @classmethod
    def from_dict(cls, json_object: dict[str, Any]) -> DeepSpeedTransformerConfig:
        config = cls()
        vars(config).update(json_object)
        config.__post_init__()
        return config

    @classmethod
    def from_json_file(cls, json_file: str | Path) -> DeepSpeedTransformerConfig:
        """Read the config from a JSON file in UTF-8 or UTF-16."""
        return cls.from_dict(json.loads(Path(json_file).read_bytes()))


class DeepSpeedTransformerLayer(nn.Module):
    """A BERT layer.

    Args:
        config: config of this layer; its `layer_id` is set.
        initial_weights: query, key, value, attention output, attention norm, both MLP layers, norm. Default:
            random, or zero if biases are given.
        initial_biases: the biases, in the same order. Default: zero.
    """

    layer_id: ClassVar[int] = 0

    def __init__(
        self,
        config: DeepSpeedTransformerConfig,
        initial_weights: list[Tensor] | None = None,
        initial_biases: list[Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        config.layer_id = DeepSpeedTransformerLayer.layer_id
        DeepSpeedTransformerLayer.layer_id += 1
        hidden, between = config.hidden_size, config.intermediate_size
        like = (initial_weights or initial_biases or [torch.empty(0)])[0]

        def new(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(*shape, dtype=like.dtype, device=like.device))

        self.attn_qkvw, self.attn_qkvb = new(3 * hidden, hidden), new(3 * hidden)
        self.attn_ow, self.attn_ob = new(hidden, hidden), new(hidden)
        self.attn_nw, self.attn_nb = new(hidden), new(hidden)
        self.inter_w, self.inter_b = new(between, hidden), new(between)
        self.output_w, self.output_b = new(hidden, between), new(hidden)
        self.norm_w, self.norm_b = new(hidden), new(hidden)
        if initial_weights is None and initial_biases is None:
            self.init_transformer_weights(config.adjust_init_range)
        for given, kind in (initial_weights, "w"), (initial_biases, "b"):
            if given is not None:
                self._take(given, kind)

    @torch.no_grad()
    def init_transformer_weights(self, adjust_init_range: bool = False) -> None:
        """Initialize all parameters."""
        std, layers = self.config.initializer_range, self.config.num_hidden_layers
        if std < 0:  # not set: the weights are loaded later
            return
        residual = std / math.sqrt(2 * layers) if adjust_init_range and layers > 0 else std
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, residual if name in ("attn_ow", "output_w") else std)
            else:
                parameter.fill_(1 if name in ("attn_nw", "norm_w") else 0)

    @torch.no_grad()
    def _take(self, given: list[Tensor], kind: str) -> None:
        self.get_parameter(f"attn_qkv{kind}").copy_(torch.cat([part.data for part in given[:3]]))
        names = ("attn_o", "attn_n", "inter_", "output_", "norm_")
        for name, value in zip(names, given[3:], strict=True):
            self.get_parameter(name + kind).copy_(value)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *unused: Any, **keywords: Any
    ) -> Tensor | tuple[Tensor]:
        """Return the layer's output.

        Args:
            hidden_states: [batch, sequence, hidden].
            attention_mask: added to the scores; [batch, 1, 1, sequence], or the full shape of the scores. A
                bool mask is true where a token may be attended to.

        Raises:
            ArgumentsError: the mask has an integer dtype.
        """
        x, before = hidden_states, self.config.pre_layer_norm
        x = x + self._dropped(self._attention(self._norm(x, "norm_") if before else x, attention_mask))
        y = self._norm(x, "attn_n")
        inner = functional.gelu(functional.linear(y, self.inter_w, self.inter_b), approximate="tanh")
        inner = self._dropped(functional.linear(inner, self.output_w, self.output_b))
        out = x + inner if before else self._norm(y + inner, "norm_")
        return (out,) if self.config.return_tuple else out

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self.get_parameter(f"{name}w"), self.get_parameter(f"{name}b")
        return functional.layer_norm(x, weight.shape, weight, bias, self.config.layer_norm_eps)

    def _attention(self, x: Tensor, mask: Tensor | None) -> Tensor:
        batch, length, hidden = x.shape
        split = functional.linear(x, self.attn_qkvw, self.attn_qkvb).view(
            batch, length, 3, self.config.heads, -1
        )
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each [batch, heads, sequence, width]
        rate = max(self.config.attn_dropout_ratio, 0.0) if self.training else 0.0
        if mask is not None and mask.dtype != torch.bool:
            mask = _added(mask, query.dtype)
        mixed = functional.scaled_dot_product_attention(query, key, value, mask, rate)
        return functional.linear(
            mixed.transpose(1, 2).reshape(batch, length, hidden), self.attn_ow, self.attn_ob
        )

    def _dropped(self, x: Tensor) -> Tensor:
        return functional.dropout(x, max(self.config.hidden_dropout_ratio, 0.0), self.training)


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if not mask.is_floating_point():
        raise ArgumentsError(
            f"the mask has dtype {mask.dtype}, but it is added to the scores",
            where="DeepSpeedTransformerLayer",
            fix="pass (1 - mask)[:, None, None] * -10000.0, as BERT does, or a boolean mask",
        )
    return mask.to(dtype)
