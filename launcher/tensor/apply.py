"""`tensor.apply`: splits the layers of a model over the tp axis, according to its plan."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from launcher.comm import Axis, broadcast
from launcher.errors import ConfigError
from launcher.models.units import ends_of, transformers_model_in, unit_modules
from launcher.tensor.adapters import (
    BASE,
    adapter_rules,
    adapts_a_linear,
    check_dropout,
    check_prompts,
    check_wrapped,
    modules_before_peft,
    reads_late,
    unwrapped,
    whole_ends,
    wrappers_of,
)
from launcher.tensor.counts import divide, head_size, resize, shared_by_groups
from launcher.tensor.dropout import RandomStreams, drops_out
from launcher.tensor.head import forward_is_replaced, keep_logits_split
from launcher.tensor.layers import ColumnParallel, SplitInfo, VocabularyHead, give_own_backward, swap
from launcher.tensor.parts import IndivisibleError, even_sizes, longest, parts_of, shares_of, valid_degrees
from launcher.tensor.plan import WHERE, matching, model_type_of, number_of, plan_of
from launcher.tensor.plans import WITHOUT_SEQUENCE
from launcher.tensor.rule import SplitRule
from launcher.tensor.sequence import SequenceParallel
from launcher.tensor.split import Split, is_quantized
from launcher.tensor.split_model import SplitModel, TensorParallelOptions, refuse_shards
from launcher.tensor.styles import STYLES, Style, split_dim

logger = logging.getLogger("launcher")


def apply(
    model: nn.Module,
    axis: Axis,
    options: TensorParallelOptions,
    *,
    device: torch.device,
) -> SplitModel:
    """Split the layers of `model` over the axis, in place.

    Parameters on meta stay on meta, with this rank's shape. Parameters with values get this rank's part of
    rank 0's values.

    Args:
        device: the device on which the model will compute.

    Raises:
        ConfigError: there is no plan, or the degree does not divide a dim that the plan splits.
    """
    check_prompts(model)
    splitter = _Splitter(model, axis, options, device, plan_of(model, options.rules))
    splits = splitter.run()
    for saved in {model, splitter.inner}:
        refuse_shards(saved)
    return SplitModel(axis, splits, splitter.sequence)


class _Splitter:
    """Carries out one `apply`."""

    def __init__(
        self,
        model: nn.Module,
        axis: Axis,
        options: TensorParallelOptions,
        device: torch.device,
        plan: Mapping[str, SplitRule],
    ) -> None:
        self.model, self.axis, self.options = model, axis, options
        self.inner = transformers_model_in(model)  # PEFT and value heads wrap it
        self.config: Any = getattr(self.inner, "config", None)
        self.wrappers, self.whole_ends = wrappers_of(model), self._whole_ends()
        late = any(reads_late(wrapper) for wrapper in self.wrappers.values() if adapts_a_linear(wrapper))
        self.overlaps = options.overlaps and not late  # a reduction waits for all terms
        self.left = {name.rpartition(".")[0] for name in options.whole}  # modules
        self.rows = [(matching(pattern), rule) for pattern, rule in plan.items()]
        streams = RandomStreams(axis, device, on=drops_out(model))
        # With sequence parallelism whole blocks are split, so single layers do not switch streams.
        self.streams = RandomStreams(axis, device, on=False) if options.sequence else streams
        self._all_streams = streams
        # local: parameter of the model -> its local parameter; split: local parameter -> its split
        self.local: dict[nn.Parameter, nn.Parameter] = {}
        self.split: dict[nn.Parameter, Split] = {}
        self.partial: set[nn.Parameter] = set()
        self.sequence: SequenceParallel | None = None
        # attention module -> number of ranks that hold each of its key-value heads
        self.holders: dict[nn.Module, int] = {}

    def _whole_ends(self) -> set[nn.Module | None]:
        replaced = forward_is_replaced(self.inner)
        if replaced and self.axis.rank == 0:
            logger.warning(
                "the forward of this %s was replaced: its output head stays whole on every tensor-parallel rank, "
                "because the new forward may read its weight",
                type(self.inner).__name__,
            )
        return whole_ends(self.inner, head=replaced)

    def run(self) -> dict[str, Split]:
        for name, module, rule in list(self._modules()):
            self._split_module(name, module, rule)
        for name, module in modules_before_peft(self.model):
            for key in list(module._parameters):
                own = self._rule_of(f"{name}.{key}" if name else key)
                if own is not None and name not in self.left:
                    self._split_parameter(name, module, key, own, named=False)
        if self._all_streams.on:
            self._check_dropout()
        self._follow()
        keep_logits_split(self.inner, self.axis, ends_of(self.inner)[1], self.options.split_logits)
        if self.options.sequence:
            self.partial |= self._slice_sequences()
        named = ((n, p) for n, p in self.model.named_parameters() if n not in self.options.whole)
        return {name: self._final(parameter) for name, parameter in named}

    def _slice_sequences(self) -> set[nn.Parameter]:
        """Install sequence parallelism, and return the parameters whose gradients become partial by it."""
        text = self.config.get_text_config() if isinstance(self.inner, PreTrainedModel) else None
        for kind in {model_type_of(self.inner), getattr(text, "model_type", "")} & set(WITHOUT_SEQUENCE):
            raise ConfigError(
                f"models of type {kind} do not support sequence parallelism: {WITHOUT_SEQUENCE[kind]}",
                where="tensor_parallel.sequence_parallel",
                fix="set it to false",
            )
        known = {*self.split, *self.partial}
        inside = set(_decoder_of(self.inner).modules())  # excludes blocks of an image tower
        blocks = [(name, block) for name, block in unit_modules(self.model) if block in inside]
        made = SequenceParallel(self.axis, blocks, self._all_streams, known, overlaps=self.overlaps)
        made.install()
        self.sequence = made
        return made.partial

    def _check_dropout(self) -> None:
        for name, wrapper in self.model.named_modules():
            layer = wrapper._modules.get(BASE)
            if layer is None or layer in self.whole_ends or self._adapted(layer) is not wrapper:
                continue
            if layer._parameters.get("weight") not in self.split:
                check_dropout(name, wrapper)

    def _follow(self) -> None:
        """Update what depends on the split parameters: tied occurrences, and head counts."""
        for module in self.model.modules():
            for key, parameter in module._parameters.items():
                if parameter in self.local:
                    module._parameters[key] = self.local[parameter]
        for owner, holders in self.holders.items():
            if hasattr(owner, "num_key_value_groups"):
                owner.num_key_value_groups //= holders  # type: ignore[assignment, operator]

    def _final(self, parameter: nn.Parameter) -> Split:
        if parameter in self.split:
            return self.split[parameter]
        self._agree(parameter)
        return Split.whole(parameter.shape, self.axis, partial=parameter in self.partial)

    # ---- modules ----------------------------------------------------------------------------

    def _rule_of(self, name: str) -> SplitRule | None:
        return next((rule for pattern, rule in self.rows if pattern.fullmatch(name)), None)

    def _modules(self) -> Iterator[tuple[str, nn.Module, SplitRule]]:
        """Yield the modules with a rule. Embedding and head are split over the vocabulary where possible."""
        embedding, head = (unwrapped(end) for end in ends_of(self.inner))
        for name, module in modules_before_peft(self.model):
            rule = self._rule_of(name)
            if module in self.whole_ends:
                continue
            if module is head and isinstance(module, nn.Linear):
                if rule is None or STYLES[rule.style].gathers:
                    rule = SplitRule("vocabulary_head")
            elif module is embedding and rule is None and isinstance(module, nn.Embedding):
                rule = SplitRule("embedding_rowwise")
            if rule is not None and name not in self.left:
                check_wrapped(name, self.wrappers.get(module, module), rule)
                yield name, module, rule

    def _split_module(self, name: str, module: nn.Module, rule: SplitRule) -> None:
        style, adapted = STYLES[rule.style], self._adapted(module)
        if style.mixin is not None:
            layer = self._layer(name, module, rule, style)
            if adapted is None:
                swap(module, style.mixin, layer)
            else:
                layer.inner = BASE
                # Conv1D's own forward needs the bias; and A shall read the input as W does (`Entered`)
                give_own_backward(adapted)
                swap(adapted, ColumnParallel if style.mixin is VocabularyHead else style.mixin, layer)
        for key in list(module._parameters):
            self._split_parameter(name, module, key, rule, named=True)
        for factor, own in () if adapted is None else adapter_rules(adapted, name, rule):
            for key in list(factor._parameters):
                self._split_parameter(name, factor, key, own, named=True)
            resize(factor, STYLES[own.style].side)
        for attribute in rule.divide:
            try:
                divide(module, attribute, self.axis.degree, replicates=rule.replicates)
            except IndivisibleError as error:
                raise self._indivisible(f"{name}.{attribute}", error.count) from None
        resize(module, style.side)

    def _adapted(self, module: nn.Module) -> nn.Module | None:
        """Return the wrapper which takes the place of a linear layer with LoRA adapters; None without any."""
        wrapper = self.wrappers.get(module)
        return wrapper if wrapper is not None and adapts_a_linear(wrapper) else None

    def _layer(self, name: str, module: nn.Module, rule: SplitRule, style: Style) -> SplitInfo:
        layer = SplitInfo(self.axis, name, self.overlaps, self.streams)
        layer.slices, layer.takes, layer.once = style.slices, style.takes, rule.once
        layer.heads = {key: (dim, getattr(module, rule.divide[0])) for key, dim in rule.heads.items()}
        weight = module._parameters.get("weight")
        if weight is None:
            return layer
        if style.gathers:
            dim = split_dim(style, module, weight)
            assert dim is not None
            shares = shares_of(weight.shape[dim], self._proportions(rule, style))
            layer.gathers = [even_sizes(share, self.axis.degree) for share in shares]
        if style.uneven:
            sizes = even_sizes(weight.shape[0], self.axis.degree)
            layer.gathers = [sizes]
            layer.start = sum(sizes[: self.axis.rank])
            layer.stop = layer.start + sizes[self.axis.rank]
        layer.rope = int(getattr(self.config, "qk_rope_head_dim", None) or 0)
        return layer

    def _proportions(self, rule: SplitRule, style: Style) -> list[int]:
        packed = style.packed if rule.packed == (1,) else rule.packed
        return [self._number(p) for p in packed] * self._number(rule.repeat)

    def _number(self, number: int | str) -> int:
        return number if isinstance(number, int) else number_of(self.config, number)

    # ---- parameters -------------------------------------------------------------------------

    def _split_parameter(
        self, name: str, module: nn.Module, key: str, rule: SplitRule, *, named: bool
    ) -> None:
        """Replace a parameter by this rank's part of it.

        Args:
            name: name of the module.
            named: whether the rule is for the module; else it is for the parameter itself.
        """
        parameter, style = module._parameters[key], STYLES[rule.style]
        if parameter is None or parameter in self.split:
            return
        if is_quantized(parameter) or not (parameter.is_floating_point() or parameter.is_complex()):
            raise _packed(f"{name}.{key}")
        if parameter in self.local:  # tied: split as at its first occurrence
            module._parameters[key] = self.local[parameter]
            return
        if style.partial:
            self.partial.add(parameter)
        dim = split_dim(style, module if named else None, parameter, bias=key == "bias")
        if dim is None:
            return
        self._agree(parameter)
        split = self._split_of(name, key, parameter, dim, rule, named=named)
        data = torch.empty(split.local_shape, dtype=parameter.dtype, device="meta")
        if not parameter.is_meta:
            data = split.take(parameter.data).clone()
        local = nn.Parameter(data, requires_grad=parameter.requires_grad)
        local.__dict__.update(parameter.__dict__)
        self.local[parameter], self.split[local] = local, split
        module._parameters[key] = local

    def _split_of(
        self, name: str, key: str, parameter: nn.Parameter, dim: int, rule: SplitRule, *, named: bool
    ) -> Split:
        style = STYLES[rule.style]
        owner = self.model.get_submodule(name.rpartition(".")[0] if named else name)
        of_heads = named and style.side == "out" and not style.gathers
        if rule.grain:
            grain = int(getattr(owner, rule.grain))
        else:
            grain = head_size(owner, name, parameter.shape[dim]) if of_heads else 1
        replicates = rule.replicates or (grain > 1 and shared_by_groups(owner, name))
        try:
            shares = shares_of(parameter.shape[dim], self._proportions(rule, style))
            parts = parts_of(shares, self.axis, grain=grain, uneven=style.uneven, replicates=replicates)
        except IndivisibleError as error:
            raise self._indivisible(f"{name}.{key}", error.count, replicates=replicates) from None
        holders = max(part.holders for part in parts)
        if holders > 1:
            self.holders[owner] = holders
        shape = list(parameter.shape)
        if style.uneven:
            shape[dim] = longest(shares, self.axis.degree, grain)
        else:
            shape[dim] = sum(part.size for part in parts)
        return Split(parameter.shape, parts, dim, partial=True, padded_numel=prod(shape))

    def _agree(self, parameter: nn.Parameter) -> None:
        """Broadcast rank 0's values, for models that each rank initialised on its own."""
        if not parameter.is_meta:
            data = parameter.data.contiguous()
            broadcast(data.view(-1), self.axis, "root/split").wait()
            parameter.data = data

    def _indivisible(self, name: str, count: int, *, replicates: bool = False) -> ConfigError:
        valid = valid_degrees(count, replicates=replicates)
        return ConfigError(
            f"{name}: {count} heads or features are not divisible by the tensor-parallel degree "
            f"{self.axis.degree}",
            where=WHERE,
            fix=f"use a degree of {', '.join(map(str, valid))}",
        )


def _packed(name: str) -> ConfigError:
    return ConfigError(
        f"the weights of {name} are quantized to packed bytes, which cannot be split over tensor-parallel ranks",
        where=WHERE,
        fix="remove tensor_parallel: ZeRO stage 3 shards them, and pipeline stages hold only their own layers; "
        "or load the model without quantization",
    )


def _decoder_of(model: nn.Module) -> nn.Module:
    """Return the part that processes tokens, if the model has get_decoder(); else the model."""
    found = model.get_decoder() if isinstance(model, PreTrainedModel) else None
    return found if isinstance(found, nn.Module) else model
