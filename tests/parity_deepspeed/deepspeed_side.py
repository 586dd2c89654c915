"""The DeepSpeed side of the comparison.

It runs in its own processes, because DeepSpeed patches torch (see `conftest.py`).

python -m tests.parity_deepspeed.deepspeed_side train JOBS.json OUT.json       (RANK, WORLD_SIZE, ... set)
python -m tests.parity_deepspeed.deepspeed_side TASK CASES.json OUT.json

where TASK is schedules, difficulties, loss_scales, optimizers, rows, gates, mixtures, saves, split_saves, exports or
conversions
"""

from __future__ import annotations

import json
import logging
import os
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.parity_deepspeed.exports import convert, go_on
from tests.parity_deepspeed.fields import REST, STEPS, Fields, gradients
from tests.parity_deepspeed.fields import follow as step_fields
from tests.parity_deepspeed.job import Job, train
from tests.parity_deepspeed.mixtures import gated
from tests.parity_deepspeed.mixtures import train as train_mixtures
from tests.parity_deepspeed.rates import follow
from tests.parity_deepspeed.rows import config_of, module_of
from tests.parity_deepspeed.rows import train as train_row
from tests.parity_deepspeed.saves import begin
from tests.parity_deepspeed.scales import follow_scale
from tests.parity_deepspeed.split_saves import begin as begin_split


def train_all(jobs: list[Job]) -> dict[str, dict[str, list[Any]]]:
    """Return job name -> the result of `train`."""
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    results = {}
    for job in jobs:
        model = job.model()
        config = job.config()
        config["zero_force_ds_cpu_optimizer"] = False
        engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[
            0
        ]
        if job.stage == 0 and job.dtype == "bf16":
            _forget_dummy_step(engine)
        results[job.name] = train(engine, job)
        engine.destroy()
    return results


def _forget_dummy_step(engine: Any) -> None:
    """Reset the step count of DeepSpeed 0.19 at stage 0 in bf16.

    DeepSpeed initializes the optimizer state by a step with zero gradients and keeps its count. Adam's bias correction
    then starts at 2, and the first update is 0.74 of the correct one.
    """
    for state in engine.optimizer.optimizer.state.values():
        state["step"].zero_()


def schedules(cases: list[dict[str, Any]]) -> list[list[list[float]]]:
    """Return the learning rates and betas of DeepSpeed's schedules for each case."""
    from deepspeed.runtime import lr_schedules

    def make(case: dict[str, Any], optimizer: torch.optim.Optimizer) -> Any:
        return getattr(lr_schedules, case["type"])(optimizer, **case["params"])

    return [follow(partial(make, case), case.get("groups", 1)) for case in cases]


def difficulties(cases: list[dict[str, Any]]) -> list[list[int]]:
    """Return the sequence lengths of DeepSpeed's curriculum at steps 1 .. `steps` for each case."""
    from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler

    schedulers = [CurriculumScheduler(case["config"]) for case in cases]
    return [
        [scheduler.update_difficulty(step) for step in range(1, case["steps"] + 1)]
        for case, scheduler in zip(cases, schedulers, strict=True)
    ]


def loss_scales(cases: list[dict[str, Any]]) -> list[list[Any]]:
    """Return the scales of DeepSpeed's DynamicLossScaler after each step, with "exhausted" if it gives up."""
    from deepspeed.runtime.fp16 import loss_scaler

    loss_scaler.dist = SimpleNamespace(get_rank=lambda: 1)  # used only to decide about logging
    paths = []
    for case in cases:
        keys = dict(case["keys"])
        scaler = loss_scaler.DynamicLossScaler(
            init_scale=2 ** keys["initial_scale_power"],
            scale_window=keys["loss_scale_window"],
            min_scale=keys["min_loss_scale"],
            delayed_shift=keys["hysteresis"],
            consecutive_hysteresis=keys["consecutive_hysteresis"],
        )
        paths.append(follow_scale(scaler.update_scale, lambda s=scaler: s.cur_scale, case["overflows"]))  # type: ignore[misc]
    return paths


def optimizers(cases: list[dict[str, Any]]) -> list[dict[str, list[float]]]:
    """Return the weights after a few steps of each case's `optimizer`, with the engine or the CPU class alone."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # otherwise Muon's functions are compiled, for minutes
    from deepspeed.runtime.zero.muon import original_muon

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    original_muon.ns_compute_dtype = lambda *_: torch.float32  # same as ours on CPUs
    return [_class_steps(case) if "class" in case else _engine_steps(case) for case in cases]


def _engine_steps(case: dict[str, Any]) -> dict[str, list[float]]:
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = Fields()
    config = {**REST, "optimizer": case["optimizer"], "zero_force_ds_cpu_optimizer": False}
    engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    left = step_fields(engine)
    engine.destroy()
    return left


def _class_steps(case: dict[str, Any]) -> dict[str, list[float]]:
    from deepspeed.ops import adagrad, lion

    model = Fields()
    cls = getattr(lion, case["class"], None) or getattr(adagrad, case["class"])
    optimizer = cls(model.parameters(), **case["optimizer"]["params"])
    for step in range(STEPS):
        for p, g in zip(model.parameters(), gradients(step), strict=True):
            p.grad = g
        optimizer.step()
    return {name: p.detach().flatten().tolist() for name, p in model.named_parameters()}


def rows(cases: list[tuple[int, bool]]) -> list[list[float]]:
    """Return the losses of DeepSpeed's PipelineModule for each (ZeRO stage, ties)."""
    import deepspeed
    import deepspeed.pipe

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    losses = []
    for stage, tied in cases:
        module = module_of(deepspeed.pipe, tied=tied)
        config = {**config_of(stage, tied=tied), "zero_force_ds_cpu_optimizer": False}
        engine = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)[0]
        losses.append(train_row(engine))
    return losses


def gates(_: None) -> list[Any]:
    """Return the results of DeepSpeed's gates."""
    from deepspeed.moe import sharded_moe

    return gated(sharded_moe)


def mixtures(_: None) -> list[list[float]]:
    """Return the losses of DeepSpeed's expert layers."""
    import deepspeed
    from deepspeed.moe.layer import MoE

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    return train_mixtures(deepspeed.initialize, MoE)


def saves(root: str) -> list[list[float]]:
    """Return the losses of DeepSpeed runs after saving them to directories below `root`."""
    import deepspeed
    from deepspeed.utils import safe_get_full_optimizer_state
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    read, gather = get_fp32_state_dict_from_zero_checkpoint, safe_get_full_optimizer_state
    return begin(deepspeed.initialize, read, gather, Path(root))


def split_saves(given: list[str]) -> list[list[float]]:
    """Return the same as `saves`, for split models."""
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    root, kind = given
    return begin_split(deepspeed, Path(root), kind)


def exports(root: str) -> list[dict[str, Any]]:
    """Return DeepSpeed's results after loading the runs exported to directories below `root`."""
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    return go_on(deepspeed, Path(root))


def conversions(root: str) -> None:
    """Convert some of the exports with DeepSpeed's own program."""
    convert(Path(root))


def main() -> None:
    task, source, out = sys.argv[1:]
    torch.set_num_threads(1)
    given = json.loads(Path(source).read_text())
    tasks: dict[str, Any] = {
        "schedules": schedules,
        "difficulties": difficulties,
        "loss_scales": loss_scales,
        "optimizers": optimizers,
        "rows": rows,
        "gates": gates,
        "mixtures": mixtures,
        "saves": saves,
        "split_saves": split_saves,
        "exports": exports,
        "conversions": conversions,
    }
    result = tasks[task](given) if task in tasks else train_all([Job(**job) for job in given])
    if os.environ.get("RANK", "0") == "0":
        Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
