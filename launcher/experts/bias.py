"""Auxiliary-loss-free load balancing: the router's correction bias of each expert follows its load.

See Wang et al. 2024, arXiv:2408.15664. Models have this bias (DeepSeek-V3, GLM-4.5, ...), but transformers
does not update it in training."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from launcher.comm import Mesh, all_reduce
from launcher.errors import ConfigError
from launcher.experts.load import TokenCounts
from launcher.experts.modules import experts_in, number_of
from launcher.tensor.adapters import peft_configs

KEY = "expert_parallel.bias_update_rate"
NAMES = ("e_score_correction_bias", "expert_bias")


class BiasUpdate:
    """Updates the correction biases of a model once per step.

    Args:
        model: has this rank's layers.
        mesh: the mesh of all ranks.
        rate: the change of a bias per step.

    Raises:
        ConfigError: the model has no such biases as buffers, or PEFT has frozen them.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, rate: float) -> None:
        if next(peft_configs(model), None) is not None:
            raise ConfigError(
                "the router's correction biases belong to the frozen model, and files of adapters would not have "
                "their changes",
                where=KEY,
                fix="remove the key, or train the whole model",
            )
        self._mesh, self._rate = mesh, rate
        found = [
            (module, bias)
            for name, module in experts_in(model)
            if (bias := _bias_of(model, name)) is not None
        ]
        if not found and mesh.axes["pp"].degree == 1:
            raise ConfigError(
                f"{type(model).__name__} has no router correction bias to update from the expert load",
                where=KEY,
                fix="remove the key, or use a model such as DeepSeek-V3 or GLM-4.5, whose routers have one",
            )
        self._biases = [bias for _, bias in found]
        self._counts = TokenCounts([module for module, _ in found], mesh.device)

    def forget(self) -> None:
        """Discard the token counts of the step so far."""
        self._counts.take()

    def update(self) -> None:
        """Raise the biases of experts with less than an even share of the step's tokens, and lower those with
        more. Every rank must call it."""
        if not self._biases:
            return
        counts = self._counts.take()
        all_reduce(counts.view(-1), self._mesh.dp_cp, "root/bias").wait()
        for row, (owner, key) in enumerate(self._biases):
            bias = owner._buffers[key]
            assert bias is not None
            of_layer = counts[row, : bias.numel()]
            step = self._rate * torch.sign(of_layer.mean() - of_layer)
            # in fp32: small steps would be lost in 16 bits
            owner._buffers[key] = bias.float().add_(step.view_as(bias))


def _bias_of(model: nn.Module, name: str) -> tuple[nn.Module, str] | None:
    """Return (module, attribute) of the bias for the experts with this name; None if there is none."""
    count = number_of(model.get_submodule(name))
    for module in model.get_submodule(name.rpartition(".")[0]).modules():
        for key in NAMES:
            buffer: Tensor | None = module._buffers.get(key)
            if buffer is not None and buffer.numel() == count:
                return module, key
    return None
