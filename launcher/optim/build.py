"""Builds the factory of the inner torch optimizer from the JSON config's `optimizer` or the caller's own."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from launcher.config import Config, OptimizerConfig
from launcher.config.optimizer import TYPES
from launcher.errors import ConfigError, UntestedOptimizerError
from launcher.optim.elementwise import UncorrectedAdam, UncorrectedAdamW
from launcher.optim.sharded import OptimizerFactory

# Only elementwise optimizers can step slices of parameters. These torch classes are not elementwise.
NOT_ELEMENTWISE = {"LBFGS", "SparseAdam", "Adafactor"}
FUSED = {"Adam", "AdamW", "SGD", "Adagrad"}
# Keywords of the JSON config that torch's classes do not accept.
DEEPSPEED_ONLY = {"adam_w_mode", "torch_adam", "bias_correction", "set_grad_none", "fp32_optimizer_states"}


def params_of(config: OptimizerConfig) -> dict[str, Any]:
    """Return `optimizer.params` as keywords for the optimizer type, with lists converted to tuples."""
    params = config.to_dict()["params"].items()
    return {key: tuple(value) if isinstance(value, list) else value for key, value in params}


def from_config(config: OptimizerConfig) -> OptimizerFactory:
    """Return the factory of the configured `optimizer.type` with its params.

    As in DeepSpeed, "Adam" means AdamW unless `adam_w_mode` is false. Fused kernels are used if torch has
    them.

    Raises:
        ConfigError: the optimizer's package is not installed.
    """
    params = params_of(config)
    if config.type == "Muon":
        return partial(_muon, params)
    if config.type == "Lion":
        from launcher.optim.elementwise import Lion

        return lambda groups: Lion(groups, params["lr"], params["betas"], params["weight_decay"])
    if config.type == "Lamb":
        from launcher.optim.lamb import Lamb

        return lambda groups: Lamb(groups, **params)
    keywords = {key: value for key, value in params.items() if key not in DEEPSPEED_ONLY}
    if TYPES[config.type].package:
        cls = getattr(_installed(config.type).optim, config.type)
        return lambda groups: cls(groups, **keywords)
    name = "AdamW" if config.type == "Adam" and config.params.adam_w_mode else config.type
    if name in FUSED and not keywords.get("foreach") and not keywords.get("differentiable"):
        keywords["fused"] = keywords.get("fused") is not False
    cls = getattr(torch.optim, name)
    if name == "Adagrad" and keywords.get("fused"):
        return partial(_adagrad, keywords)
    if not config.params.bias_correction:
        cls = {"Adam": UncorrectedAdam, "AdamW": UncorrectedAdamW}[name]
    return lambda groups: cls(groups, **keywords)


def _adagrad(keywords: dict[str, Any], groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Use the fused kernel only if all parameters are on the CPU: torch 2.11 does not support it on GPUs."""
    devices = {p.device.type for group in groups for p in group["params"]}
    return torch.optim.Adagrad(groups, **{**keywords, "fused": devices <= {"cpu"}})


def _muon(params: dict[str, Any], groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    cls = torch.optim.AdamW if params.get("adam_w_mode", True) else torch.optim.Adam
    foreach = params.get("foreach")
    from launcher.optim.muon import Muon

    return Muon(groups, lambda rest: cls(rest, foreach=foreach, fused=None if foreach else True))


def _installed(kind: str) -> Any:
    """Import and return the package of an optimizer type."""
    package = str(TYPES[kind].package)
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(
            f"{kind} requires the package {package}, which cannot be imported: {error}",
            where="optimizer.type",
            fix=f'install it (pip install {package}), or use "type": "AdamW"',
        ) from error


def from_client(optimizer: torch.optim.Optimizer, *, untested_allowed: bool) -> OptimizerFactory:
    """Return a factory for the caller's own optimizer, which keeps its options and gets this rank's slices as
    parameters.

    Raises:
        ConfigError: the optimizer is not elementwise, or it is unknown and `zero_allow_untested_optimizer` is
            false.
    """
    name = type(optimizer).__name__
    if name in NOT_ELEMENTWISE:
        raise ConfigError(
            f"{name} is not elementwise: it cannot update the slices of parameters that a rank owns",
            where="initialize(optimizer=...)",
            fix="use an elementwise optimizer such as AdamW, Adam, SGD, RMSprop or Adagrad",
        )
    known = type(optimizer).__module__.startswith(("torch.optim", "launcher.")) or hasattr(
        optimizer, "steps_as"
    )
    if not known and not untested_allowed:
        raise UntestedOptimizerError(
            f"{name} is not a torch.optim optimizer and may not be elementwise",
            where="initialize(optimizer=...)",
            fix='set "zero_allow_untested_optimizer": true if the update of each element depends on '
            "that element alone",
        )

    if name == "Muon" and type(optimizer) is torch.optim.Muon:
        return partial(_adopt_muon, optimizer)

    def adopt(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        optimizer.state.clear()
        for own, group in zip(optimizer.param_groups, groups, strict=True):
            own["params"] = group["params"]
        return optimizer

    return adopt


def _adopt_muon(optimizer: torch.optim.Muon, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return our Muon with the caller's options: torch's needs whole matrices, and ours steps slices."""
    from launcher.optim.muon import Muon

    muon = Muon([{**group, "use_muon": True} for group in groups])
    # a schedule created on the caller's object must also change our groups
    optimizer.param_groups = muon.param_groups
    return muon


def named_groups(parameters: Iterable[Any] | None, names: dict[int, str]) -> list[dict[str, Any]]:
    """Return param groups with parameter names, from `model_parameters` or a client optimizer's
    `param_groups`.

    Args:
        parameters: parameters, or dicts with "params" and options; None: every trainable parameter in one
            group.
        names: id(parameter) -> name, for the trainable parameters of the model.

    Raises:
        ConfigError: a parameter does not belong to the model.
    """
    if parameters is None:
        return [{"names": list(dict.fromkeys(names.values()))}]
    given = list(parameters)
    if not given or not isinstance(given[0], dict):
        given = [{"params": given}]
    groups = []
    for group in given:
        members = group["params"] if not isinstance(group["params"], torch.Tensor) else [group["params"]]
        members = [p for p in members if p.requires_grad]
        strangers = [p for p in members if id(p) not in names]
        if strangers:
            raise ConfigError(
                f"the optimizer has a parameter of shape {tuple(strangers[0].shape)} that the model does not have",
                where="initialize(optimizer=..., model_parameters=...)",
                fix="construct the optimizer with the parameters of the model that is passed, after anything that "
                "replaces them (as accelerate's mixed_precision=\"fp8\" does: the JSON's fp8 does not)",
            )
        options = {k: v for k, v in group.items() if k != "params"}
        groups.append({**options, "names": list(dict.fromkeys(names[id(p)] for p in members))})
    return groups


def choose(
    config: Config,
    client: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None,
    parameters: Iterable[Any] | None,
    model: nn.Module,
) -> tuple[OptimizerFactory, list[dict[str, Any]]] | None:
    """Return the optimizer factory and the param groups by name, or None if neither the caller nor the JSON
    config has an optimizer.

    The caller's optimizer takes precedence, as in DeepSpeed. Must be called before the parameters move into
    flat buffers.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    names = {id(p): name for name, p in trained.items()}
    if client is None and config.optimizer is None:
        return None
    if client is None:
        assert config.optimizer is not None
        kind, params = config.optimizer.type, params_of(config.optimizer)
        if TYPES[kind].package != "mup":
            groups = named_groups(parameters, names)
            if kind == "Muon":
                from launcher.optim.muon import halves

                groups = halves(groups, trained, params)
            return from_config(config.optimizer), groups
        # mup creates param groups by the widths of whole parameters, so it needs the parameters themselves.
        client = partial(getattr(_installed(kind), kind), **params)
    if not isinstance(client, torch.optim.Optimizer):
        given = (
            list(parameters) if parameters is not None else [p for p in model.parameters() if p.requires_grad]
        )
        client = client(given)
    adopt = from_client(client, untested_allowed=config.zero_allow_untested_optimizer)
    return adopt, named_groups(client.param_groups, names)
