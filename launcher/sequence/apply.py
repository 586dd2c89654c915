"""`sequence.apply` turns a model into one whose sequences are sharded over the ranks of the cp axis."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from launcher.comm import Axis, Mesh
from launcher.models.units import transformers_model_in
from launcher.sequence.arguments import (
    CACHE,
    NoCache,
    NoCacheError,
    check_arguments,
    check_length,
    names,
    takes,
)
from launcher.sequence.attention import SharedAttention
from launcher.sequence.inputs import (
    EMBEDDINGS,
    IDS,
    POSITIONS,
    SHIFTED,
    SharedSequence,
    current,
    cut,
    refused,
)
from launcher.sequence.layout import SequenceLayout
from launcher.sequence.rotary import follow_length
from launcher.sequence.slices import from_slices
from launcher.tensor.functions import gather_along, leave
from launcher.tensor.split_model import wants_no_logits

logger = logging.getLogger("launcher")

_WHOLE = {"loss", "logits", "hidden_states", "last_hidden_state", "aux_loss"}
"""Outputs that are unsharded, and equal on all cp ranks, when the model returns them."""
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
"""Layer types in which only attention mixes tokens."""


def causal_lm_in(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model itself, or the one wrapped by `model` (PEFT, a value head).

    Raises:
        ConfigError: `model` contains no transformers model, or several.
    """
    found = transformers_model_in(model)
    if not isinstance(found, PreTrainedModel):
        raise refused(model, "is not a transformers model")
    return found


def apply(model: nn.Module, mesh: Mesh, layout: SequenceLayout) -> SharedModel:
    """Shard the sequences of a Hugging Face causal LM, in place. Every rank must call it.

    Raises:
        ConfigError: the model cannot work on slices of a sequence.
    """
    model = causal_lm_in(model)
    if not model._supports_attention_backend:
        raise refused(model, "does not support transformers' AttentionInterface")
    if POSITIONS not in inspect.signature(type(model).forward).parameters:
        raise refused(model, f"has no argument {POSITIONS}")
    config: Any = model.config.get_text_config()
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in _ATTENTION:
            raise refused(
                model, f"has layers of type {kind}, which access other tokens in an unsupported way"
            )
    if getattr(config, "output_router_logits", False):
        raise refused(model, "has an auxiliary router loss (output_router_logits), which needs all tokens")
    ring, ulysses = mesh.split_cp(layout.ulysses)
    attention = SharedAttention(ring, ulysses, config._attn_implementation or "sdpa")
    attention.install(config)
    shared = SharedModel(model, mesh.axes["cp"], layout, attention)
    shared.install()
    return shared


@dataclass
class SharedModel:
    """A model with sharded sequences: the hooks around its forward.

    Args:
        axis: cp.
        layout: how sequences are sharded.
        attention: the attention of the model's layers.

    Attributes:
        loss_computed: the current forward has called `loss_function`.
        active: if false, every rank computes full sequences.
        slices: batches arrive already sharded.
        in_eval: shard sequences in evaluation, too.
        pads_alone: for padded batches, the model computes positions other than 0, 1, 2, ...
        mixes_documents: with full sequences, the model lets packed documents attend to each other.
        gives_cache: without sharding, the current forward would return a cache.
        warned: the warning about packed documents has been logged.
    """

    model: PreTrainedModel
    axis: Axis
    layout: SequenceLayout
    attention: SharedAttention
    loss_computed: bool = False
    active: bool = True
    slices: bool = False
    in_eval: bool = True
    pads_alone: bool = False
    mixes_documents: bool = False
    gives_cache: bool = False
    warned: bool = False

    def install(self) -> None:
        self.own_loss = self.model.loss_function
        self.model.loss_function = self.loss
        self.names = list(inspect.signature(type(self.model).forward).parameters)[1:]
        self.handles = [
            # prepended, so that the model's other hooks see the slice and whether a loss is requested
            self.model.register_forward_pre_hook(self.before, prepend=True, with_kwargs=True),
            self.model.register_forward_hook(self.after, with_kwargs=True, always_call=True),
            *follow_length(self.model),
        ]

    def remove(self) -> None:
        """Restore the model's forward over full sequences."""
        for handle in self.handles:
            handle.remove()
        self.model.loss_function = self.own_loss
        self.attention.remove(self.model.config.get_text_config())

    def takes_slices(self, *, in_eval: bool) -> None:
        """Expect batches that are already sharded, from the next forward on."""
        self.slices, self.in_eval = True, in_eval
        self.layout = replace(self.layout, kind="contiguous")

    def before(self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        batch = {**dict(zip(self.names, args, strict=False)), **keywords}
        current.set(None)
        if batch.get(IDS) is None and batch.get(EMBEDDINGS) is None:
            return None
        if isinstance(batch.get(CACHE), NoCache):
            raise NoCacheError
        generates = batch.get(CACHE) is not None or batch.get("use_cache")
        generates = generates or (batch.get("logits_to_keep") and not torch.is_grad_enabled())
        shares = self.active and (self.in_eval or module.training)
        if generates or not shares:  # every rank computes the full sequence
            return None
        check_arguments(module, batch, pads_alone=self.pads_alone)
        if self.slices:
            batch, sequence = from_slices(batch, self.layout, self.axis)
        else:
            batch, sequence = cut(batch, self.layout, self.axis)
        check_length(module, sequence.length)
        if sequence.packed:
            self._tell_of_documents()
        if SHIFTED in batch and not takes(module, SHIFTED):
            del batch[SHIFTED]  # `loss` takes them from `sequence`
        if "use_cache" in self.names:
            config: Any = self.model.config.get_text_config()
            self.gives_cache = getattr(config, "use_cache", False) and batch.get("use_cache") is None
            batch["use_cache"] = False
        self.loss_computed = False
        current.set(sequence)
        return (), batch

    def after(self, module: nn.Module, args: Any, keywords: Any, output: Any) -> Any:
        sequence = current.get()
        current.set(None)
        if sequence is None or output is None:
            return None
        if sequence.came_in_slices:
            asked = getattr(output, "loss", None) is not None
            if asked and not self.loss_computed and not names(module, SHIFTED):
                raise refused(module, "computes its loss itself, and does not accept shift_labels")
            return None
        if sequence.shift_labels is not None and not self.loss_computed:
            raise refused(module, "computes its loss itself instead of calling loss_function")
        if not isinstance(output, ModelOutput):
            raise refused(module, f"returns a {type(output).__name__}, not a ModelOutput")
        for key in ("hidden_states", "last_hidden_state"):
            if output.get(key) is not None:
                output[key] = tree_map(lambda x: self.whole(x, sequence), output[key])
        for key in output:
            known = key in _WHOLE or not any(isinstance(leaf, Tensor) for leaf in tree_leaves(output[key]))
            if not known:
                raise refused(module, f"returns {key}, of which each rank computes only a part")
        if self.gives_cache and not module.training and hasattr(output, CACHE):
            output[CACHE] = NoCache()
        if output.get("logits") is None:
            return output
        if sequence.shift_labels is not None and wants_no_logits(module):
            output["logits"] = None  # a slice could be mistaken for the full logits
        else:
            output["logits"] = self.whole(output["logits"], sequence)
        return output

    def _tell_of_documents(self) -> None:
        """Warn once if a single process would treat packed documents differently."""
        if not self.mixes_documents or self.warned:
            return
        self.warned = True
        if dist.get_rank() == 0:
            logger.warning(
                "%s: packed documents (position_ids) do not attend to each other here, but they do without context "
                "parallelism: transformers separates them only if config.use_cache is false, and not in every model",
                type(self.model).__name__,
            )

    @contextmanager
    def verified(self, *, active: bool) -> Iterator[None]:
        """In this context, every rank gets the full batch, and computes all of it unless `active`."""
        before = self.active, self.slices, self.in_eval
        self.active, self.slices, self.in_eval = active, False, True
        try:
            yield
        finally:
            self.active, self.slices, self.in_eval = before

    def loss(
        self, logits: Tensor, labels: Tensor | None, vocab_size: int, *args: Any, **keywords: Any
    ) -> Tensor:
        """Return the loss of the model's own `loss_function`, over the tokens of all ranks."""
        sequence = current.get()
        if sequence is None:
            loss: Tensor = self.own_loss(logits, labels, vocab_size, *args, **keywords)
            return loss
        self.loss_computed = True
        if sequence.came_in_slices:
            keywords["shift_labels"] = sequence.shift_labels
            of_slice: Tensor = self.own_loss(logits, labels, vocab_size, *args, **keywords)
            return of_slice
        if keywords.get("num_items_in_batch") is None:
            keywords["num_items_in_batch"] = sequence.tokens
        keywords["shift_labels"] = sequence.shift_labels
        mine = self.own_loss(logits, labels, vocab_size, *args, **keywords)
        return _of_each_rank(leave(mine, self.axis, "head/loss"), self.axis)

    def whole(self, x: Tensor, sequence: SharedSequence) -> Tensor:
        """Gather the ranks' [B, S / degree, ...] into [B, S, ...], in sequence order and without padding."""
        gathered = _of_each_rank(gather_along(x, self.axis, 1, "head/outputs"), self.axis)
        order = self.layout.order(sequence.padded).to(x.device)
        return gathered.index_select(1, order.argsort())[:, : sequence.length]


def _of_each_rank(shared: Tensor, axis: Axis) -> Tensor:
    """Return a tensor that is equal on all cp ranks, with its gradient scaled by the cp degree.

    [Note: The gradient of a shared loss]
    All cp ranks have the same loss, and each runs its backward. The gradient of a parameter is the sum of the
    contributions through the tokens of each rank. ZeRO averages over dp x cp, so each rank multiplies the
    contribution of its own tokens by the cp degree. This is the gradient of an all-reduced sum on which every
    rank calls backward.
    """
    if shared.requires_grad:
        shared.register_hook(lambda gradient: gradient * axis.degree)
    return shared
