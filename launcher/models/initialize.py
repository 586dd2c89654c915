"""Initialises one module from (seed, name): the same values on every topology and in any order of modules.

Hugging Face initialises a model by calling `_init_weights` on every module, children first. A module's own
call is not enough: GPT-2's attention rescales its child `c_proj`, T5's root overwrites `shared`.
So the calls that write into a module's tensors are determined once, by running all calls on meta stand-ins
(`initialize_plan.py`), and `initialize_module` repeats exactly those calls, in order, with every other
tensor replaced by a stand-in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers.initialization import guard_torch_init_functions

from launcher.errors import LauncherError
from launcher.models.initialize_plan import InitializationPlan, plan_of, stand_ins


def initialize_module(
    root: nn.Module, name: str, module: nn.Module, seed: int, plan: InitializationPlan | None = None
) -> None:
    """Initialise the parameters and buffers that `module` owns directly (not its children's).

    They must have been materialised, with any content, on a real device; nothing else in `root` needs data.
    The values depend only on `seed`, `name`, the shapes and the device type, whose generator draws them. The
    global RNG state is preserved. A tied parameter is initialised with the module that owns it
    (`owner_of_tied` in the plan: HF's source, else the first name); the other modules skip it. Tensors that
    HF marked `_is_hf_initialized` are skipped, too.

    The first call inspects ties and all of `root`. If parameters are to be replaced by other objects one by
    one, call `plan_of(root)` before the first replacement.

    Args:
        root: the whole model, for HF's `_init_weights`, which reads its config.
        name: the name of `module` in `root` ("" for the root itself).
        module: the module whose own tensors are initialised.
        seed: the run's seed.
        plan: the plan of `root`, if already made.

    Raises:
        LauncherError: no `_init_weights` or `reset_parameters` writes one of the tensors, or one is still
            on meta.
    """
    if getattr(module, "_is_hf_initialized", False):
        return
    plan = plan or plan_of(root)
    owned = plan.owned(name, module)
    _check(plan, name, module, owned)
    if not owned:
        return
    device = next(iter(owned.values())).device
    keep = {(name, key) for key in owned}
    with torch.no_grad(), guard_torch_init_functions(), seeded(device, seed, name):
        for writer in plan.writers_of(name):
            with stand_ins(root, plan.touched_by(writer) - keep):
                plan.call(root, writer)


def initializer(model: nn.Module, seed: int) -> Callable[[nn.Module, str, nn.Module], None]:
    """Return a function (root, name, module) -> None that calls `initialize_module` with the plan of `model`
    as it is now; `root` may be a copy of it."""
    plan = plan_of(model)
    return lambda root, name, module: initialize_module(root, name, module, seed, plan)


def _check(plan: InitializationPlan, name: str, module: nn.Module, owned: dict[str, torch.Tensor]) -> None:
    where = f"{name or 'the root module'} ({type(module).__name__})"
    on_meta = [key for key, tensor in owned.items() if tensor.is_meta]
    attributes = vars(module).items()
    on_meta += [key for key, value in attributes if isinstance(value, torch.Tensor) and value.is_meta]
    if on_meta:
        raise LauncherError(
            f"These tensors are still on the meta device and cannot be initialised: {', '.join(on_meta)}.",
            where=where,
            fix="materialise them first; register tensors that are plain attributes as buffers",
        )
    orphans = [key for key in owned if not plan.is_written(name, key)]
    if orphans:
        raise LauncherError(
            f"Nothing initialises {', '.join(orphans)}: neither the model's _init_weights "
            "nor the module's reset_parameters sets it.",
            where=where,
            fix=f"give {type(module).__name__} a reset_parameters() that fills all its tensors",
        )


@contextmanager
def seeded(device: torch.device, seed: int, name: str) -> Iterator[None]:
    """Seed `device`'s generator from (seed, name) in this context, and restore the RNG state afterwards."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    value = int.from_bytes(digest[:8], "little") >> 1
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"):
        # Not torch.manual_seed, which would reseed every other device as well.
        torch.default_generator.manual_seed(value)
        if devices:
            accelerator = getattr(torch, device.type)
            index = device.index if device.index is not None else accelerator.current_device()
            accelerator.default_generators[index].manual_seed(value)
        yield
