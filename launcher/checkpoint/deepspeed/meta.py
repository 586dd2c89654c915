"""Converts the non-tensor content of a DeepSpeed checkpoint to the form of launcher's own meta.json."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from launcher.checkpoint.deepspeed.unpickle import StandIn, plain
from launcher.comm.plain import encode

logger = logging.getLogger("launcher")

OWN = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
    *(
        "shared_params",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "sparse_tensor_module_names",
        "skipped_steps",
    ),
    *("global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version"),
    *(
        "num_experts",
        "ds_autoep_layers",
        "checkpoint_parallel_dimensions",
        "universal_checkpoint_info",
        "csr_tensor_module_names",
        "amp",
        "rng_states",
    ),
}
"""DeepSpeed's own keys; all others are the client state of the script."""
OPTIONS = (
    *("lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "amsgrad", "maximize"),
    *("alpha", "centered", "lambd", "t0", "momentum_decay", "lr_decay", "rho", "initial_lr"),
)
"""Options of a param group that have the same meaning in launcher."""
_OPTIMIZERS: dict[frozenset[str], tuple[str, ...]] = {
    frozenset(("exp_avg", "exp_avg_sq")): ("AdamW", "Adam"),
    frozenset(("exp_avg",)): ("Lion",),
    frozenset(("exp_avg", "exp_avg_sq", "max_exp_avg_sq")): ("AdamW", "Adam"),
    frozenset(("momentum_buffer",)): ("SGD",),
    frozenset(("sum",)): ("Adagrad",),
    frozenset(("square_avg",)): ("RMSprop",),
    frozenset(("exp_avg", "exp_inf")): ("Adamax",),
    frozenset(("square_avg", "acc_delta")): ("Adadelta",),
}
"""States of a parameter -> the optimizers that have them."""


def meta_of(
    model: Mapping[str, Any],
    optimizer: Mapping[str, Any] | None,
    groups: Sequence[Mapping[str, Any]],
    states: Mapping[Any, Mapping[str, Any]],
    tied: Mapping[str, str],
    parameters: Sequence[Sequence[str]] = (),
) -> dict[str, Any]:
    """Return the meta of a checkpoint.

    Args:
        model: content of rank 0's model file.
        optimizer: rank 0's optimizer state, with ZeRO.
        groups: the options of the param groups.
        states: states of each of the optimizer's tensors.
        tied: other name of a tied parameter -> its first name.
        parameters: names of the parameters, by param group; (): unknown.
    """
    config = model.get("ds_config") if plain(model.get("ds_config")) else {}
    steps = int(model.get("global_steps", 0))
    rates = [float(group["lr"]) for group in groups if "lr" in group]
    schedule = model.get("lr_scheduler")
    if isinstance(schedule, dict) and "last_batch_iteration" in schedule:
        schedule = {**({"last_lr": rates} if rates else {}), **schedule}
    names = frozenset(
        key
        for state in states.values()
        for key, value in state.items()
        if isinstance(value, Tensor) and key != "step"
    )
    client = {key: value for key, value in model.items() if key not in OWN}
    left = sorted(key for key, value in client.items() if not plain(value))
    if left:
        logger.warning(
            "client state keys in the DeepSpeed checkpoint that are not loaded: %s", ", ".join(left)
        )
    meta: dict[str, Any] = {
        "global_steps": steps,
        "global_samples": int(model.get("global_samples", 0)),
        "micro_steps": steps * _accumulation(config or {}, model),
        "skipped_steps": int(model.get("skipped_steps", 0)),
        "loss_scale": _loss_scale(optimizer or model.get("optimizer") or {}),
        "scheduler": schedule if plain(schedule) else None,
        "optimizer": {
            "type": types_of(names, config or {}),
            "param_groups": [{key: group[key] for key in OPTIONS if key in group} for group in groups],
            **({"names": [list(group) for group in parameters]} if parameters else {}),
        }
        if groups
        else None,
        "world_size": int(model.get("dp_world_size", 1)),
        "writer": f"DeepSpeed {model.get('ds_version', 'of an unknown version')}",
        "config": config,
        "model": None,
        "tied": dict(tied),
        "client_state": {key: value for key, value in client.items() if key not in left},
    }
    return {key: encode(value) for key, value in meta.items()}


def types_of(states: frozenset[str], config: Mapping[str, Any]) -> list[str] | None:
    """Return the optimizers that may have these states; None if no step was made, so that any fits."""
    if not states:
        return None
    section = config.get("optimizer")
    said = str(section.get("type", "")) if isinstance(section, Mapping) else ""
    if said and "adam" not in said.lower() and "exp_avg_sq" in states:
        return [said]  # Lamb's states have the names of Adam's
    return list(_OPTIMIZERS.get(states, (f"an optimizer with the states {', '.join(sorted(states))}",)))


def _accumulation(config: Mapping[str, Any], model: Mapping[str, Any]) -> int:
    """Return the number of microbatches per step."""
    said = config.get("gradient_accumulation_steps")
    if isinstance(said, int):
        return said
    batch, micro = config.get("train_batch_size"), config.get("train_micro_batch_size_per_gpu")
    if isinstance(batch, int) and isinstance(micro, int):
        return max(1, batch // (micro * int(model.get("dp_world_size", 1))))
    return 1


def _loss_scale(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of launcher's loss scaler."""
    scaler = state.get("loss_scaler")
    said = dict(vars(scaler)) if isinstance(scaler, StandIn) else dict(state)
    return {
        "dynamic": bool(state.get("dynamic_loss_scale", False)),
        "scale": float(said.get("cur_scale", 1.0)),
        "tolerance": int(said.get("cur_hysteresis", 1)),
        "step": int(said.get("cur_iter", 0)),
        "last_overflow": int(said.get("last_overflow_iter", -1)),
    }
