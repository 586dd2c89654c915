"""LoRA adapters (Hu et al. 2021, arXiv:2106.09685) on a model: PEFT's modules, their settings and initial values."""

from __future__ import annotations

import argparse
import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from launcher.errors import ConfigError
from launcher.models.initialize import initializer, seeded
from launcher.models.state_names import persistent

EVERY_LAYER = "all-linear"
SETTINGS, ADAPTED = "lora", "adapted"
"""Keys of the client state of a checkpoint: the settings of its adapters, and the fingerprint of the weights that
they belong to."""
FACTORS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
"""PEFT's names of the modules that hold the factors of an adapter."""


@dataclass(frozen=True)
class LoraSettings:
    """The settings of LoRA adapters: a layer of weight W computes with W + alpha / rank * B A.

    Args:
        rank: rank of A and B.
        targets: comma-separated names of the adapted layers, sorted; or "all-linear", as in PEFT's
            `target_modules`.
        alpha: scale of the adapters.
        dropout: probability of dropout in front of A.
        load_in_4bit: whether the frozen linear layers are quantized (QLoRA; Dettmers et al. 2023,
            arXiv:2305.14314).
    """

    rank: int
    targets: str
    alpha: int
    dropout: float
    load_in_4bit: bool = False

    @classmethod
    def of(
        cls,
        rank: int,
        targets: str | None = None,
        alpha: int | None = None,
        dropout: float | None = None,
        load_in_4bit: bool | None = None,
    ) -> LoraSettings:
        """Return settings with defaults for None: all linear layers, alpha 2 * rank, no dropout, not quantized."""
        names = {name.strip() for name in (targets or EVERY_LAYER).split(",")}
        return cls(rank, ",".join(sorted(names)), alpha or 2 * rank, dropout or 0.0, load_in_4bit or False)

    @classmethod
    def of_flags(cls, flags: argparse.Namespace) -> LoraSettings:
        """Return the settings that --lora and the flags beside it request."""
        more = ("lora_targets", "lora_alpha", "lora_dropout", "load_in_4bit")
        return cls.of(flags.lora, *(getattr(flags, key, None) for key in more))

    def of_peft(self) -> Any:
        """Return PEFT's LoraConfig.

        Raises:
            ConfigError: PEFT is not installed.
        """
        try:
            from peft import LoraConfig
        except ImportError:
            raise ConfigError(
                "LoRA adapters require PEFT, which is not installed", where="--lora", fix="pip install peft"
            ) from None
        return LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules=self.names or EVERY_LAYER,
            task_type="CAUSAL_LM",
        )

    @property
    def names(self) -> list[str]:
        """Return the target names one by one; none for all linear layers."""
        return [] if self.targets == EVERY_LAYER else self.targets.split(",")


@dataclass(frozen=True)
class TrainedAdapters:
    """The adapters that a run trains, and the weights that they belong to, which are not in its checkpoints.

    Args:
        settings: of the adapters.
        base: directory of the weights, or their name on the Hub.
        fingerprint: `SafetensorsSource.fingerprint` of the weights.
    """

    settings: LoraSettings
    base: str
    fingerprint: str

    def client_state(self) -> dict[str, Any]:
        """Return what a checkpoint records of them."""
        return {SETTINGS: asdict(self.settings), ADAPTED: self.fingerprint}


def with_adapters(model: PreTrainedModel, settings: LoraSettings) -> nn.Module:
    """Return PEFT's model, whose only trained parameters are the adapters.

    Args:
        model: may be on meta; modified in place.

    Raises:
        ConfigError: PEFT is not installed, or the model has no such layers.
    """
    config = settings.of_peft()
    from peft import get_peft_model

    layers = dict(model.named_modules())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # raised by transformers when PEFT uses it
            warnings.filterwarnings("ignore", "The alpha_pattern/rank_pattern keys")  # its own, for experts
            adapted: Any = get_peft_model(model, config)
    except ValueError as error:
        _check_targets(layers, settings.names)
        said = str(error).splitlines()[0]
        if "lora_dropout" in said:
            raise ConfigError(
                "adapters of experts cannot have dropout",
                where="--lora-dropout",
                fix="remove it, or adapt other layers: --lora-targets q_proj,v_proj",
            ) from None
        raise ConfigError(
            f"{said[:-1]} is not a layer that can be adapted" if said.endswith("(") else said,
            where="--lora-targets",
            fix=f"name layers of the model, such as q_proj,v_proj; or {EVERY_LAYER}",
        ) from None
    if settings.names:  # without those that PEFT knows as parts of the experts' parameters
        _check_targets(layers, sorted(adapted.peft_config["default"].target_modules))
    made: nn.Module = adapted.train()
    return made


def _check_targets(layers: Mapping[str, nn.Module], targets: Sequence[str]) -> None:
    """Raise ConfigError if a target matches no layer: PEFT ignores it as long as another one matches."""
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in layers):
            weighted = {name.rpartition(".")[2] for name, layer in layers.items() if hasattr(layer, "weight")}
            raise ConfigError(
                f"the model has no layer {target}",
                where="--lora-targets",
                fix=f"name layers of the model: {', '.join(sorted(weighted))}; or {EVERY_LAYER}",
            )


def initializer_with_adapters(
    model: PreTrainedModel, seed: int
) -> Callable[[nn.Module, str, nn.Module], None]:
    """Return a function (root, name, module) -> None that initializes what `module` of the adapted model owns
    directly, from the seed and the name: factors as in PEFT, so that the adapters change nothing at first, and the
    rest as in `initialize.initializer`.

    Args:
        model: on meta, before `with_adapters`: a model's own initialization does not know the adapters.
    """
    before = copy.deepcopy(model)
    make_before = initializer(before, seed)

    def make(root: nn.Module, name: str, module: nn.Module) -> None:
        path = name.split(".")
        if factors := [part for part in path if part in FACTORS]:
            for value in module.parameters(recurse=False):
                with torch.no_grad(), seeded(value.device, seed, name):
                    _START[factors[-1]](value)
            return
        path = [part for part in path[2 if path[:2] == _OUTER else 0 :] if part != "base_layer"]
        twin = before.get_submodule(".".join(path))
        with _lent(twin, module):
            make_before(before, ".".join(path), twin)

    return make


@contextmanager
def _lent(twin: nn.Module, module: nn.Module) -> Iterator[None]:
    """Give `twin` the tensors of `module` inside the `with`."""
    kept = dict(twin._parameters), dict(twin._buffers)
    twin._parameters.update(module._parameters)
    twin._buffers.update(module._buffers)
    try:
        yield
    finally:
        twin._parameters.update(kept[0])
        twin._buffers.update(kept[1])


_OUTER = ["base_model", "model"]  # PEFT's names of the model inside its own
_START: Mapping[str, Callable[[torch.Tensor], object]] = {
    "lora_A": lambda value: nn.init.kaiming_uniform_(value, a=math.sqrt(5)),
    "lora_B": nn.init.zeros_,
    "lora_embedding_A": nn.init.zeros_,
    "lora_embedding_B": nn.init.normal_,
}


def names_under(model: nn.Module, names: Mapping[str, str]) -> Callable[[nn.Module], dict[str, str]]:
    """Return a function that maps the names of the same parameters and buffers in a model that wraps `model`.

    Args:
        model: before it is wrapped.
        names: name in `model` -> any value.
    """
    values = {id(tensor): names[name] for name, tensor in persistent(model) if name in names}
    return lambda wrapped: {
        name: values[id(tensor)] for name, tensor in persistent(wrapped) if id(tensor) in values
    }
