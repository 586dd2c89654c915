"""Runs of split models (AutoTP, PipelineModule, experts) that DeepSpeed begins and saves, and their universal
checkpoints.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.parity_deepspeed import rows, saves
from tests.parity_deepspeed.mixtures import CLASSES, TOKENS, WIDTH, Classifier
from tests.pool.reference import batch, share

BEFORE, AFTER = saves.BEFORE, saves.AFTER
CASES: list[dict[str, Any]] = [
    {"tp": 2, "stage": 0, "kind": "plain"},
    {"tp": 2, "stage": 1, "kind": "groups"},
    {"tp": 2, "stage": 2, "kind": "plain", "dtype": "bf16"},
    {"tp": 2, "stage": 3, "kind": "plain"},
    # Runs of one kind share processes: DeepSpeed's groups for a split model affect a later PipelineModule.
    {"tp": 1, "pp": 2, "stage": 0, "kind": "plain"},
    {"tp": 1, "pp": 2, "stage": 1, "kind": "tied"},
    {"tp": 1, "pp": 2, "stage": 1, "kind": "plain", "dtype": "bf16"},
    {"tp": 1, "ep": 2, "stage": 0, "kind": "plain"},
    {"tp": 1, "ep": 1, "stage": 1, "kind": "plain"},
    {"tp": 1, "ep": 2, "stage": 2, "kind": "plain"},
    {"tp": 1, "ep": 2, "stage": 1, "kind": "plain", "dtype": "bf16"},
]


def cases_of(kind: str) -> list[tuple[int, dict[str, Any]]]:
    """Return the cases of a kind, "tp", "pp" or "ep", with their numbers."""
    return [
        (number, case)
        for number, case in enumerate(CASES)
        if kind == next((key for key in ("pp", "ep") if key in case), "tp")
    ]


def config_of(case: dict[str, Any], world: int, tp: int, stage: int) -> dict[str, Any]:
    if "ep" in case:
        config = saves.config_of({**case, "stage": stage}, world)
    elif "pp" in case:
        config = rows.config_of(stage, tied=case["kind"] == "tied")
        config |= {"train_micro_batch_size_per_gpu": 4 // world, "gradient_clipping": 0.0}
    else:
        config = saves.config_of({**case, "stage": stage}, world // tp)
        config |= {"train_micro_batch_size_per_gpu": 4 * tp // world}
        del config["train_batch_size"]
        if tp > 1:
            config["tensor_parallel"] = {"autotp_size": tp}
    if case.get("dtype"):
        config[case["dtype"]] = {"enabled": True}
    if case.get("dtype") and "pp" in case:  # DeepSpeed then uses a separate class with its own files
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def build(case: dict[str, Any], pipe: Any, moe: Any, seed: int = 0, ranks: int = 2) -> Any:
    """Return the model. `pipe` and `moe`: DeepSpeed's pipeline module and its expert class, of either side."""
    if "ep" in case:
        told = {"ep_size": min(case["ep"], ranks), "k": 1, "drop_tokens": False, "use_rts": False}
        return Classifier(moe, told, balance=0.0, seed=seed)
    if "pp" in case:
        torch.manual_seed(seed)
        return rows.module_of(pipe, tied=case["kind"] == "tied")
    return saves.model_of(case, seed)


def arguments_of(case: dict[str, Any], model: Any) -> dict[str, Any]:
    return {"model_parameters": list(model.parameters())} if "pp" in case else saves.arguments_of(case, model)


def steps(engine: Any, case: dict[str, Any], tp: int, first: int, count: int) -> list[float]:
    """Return the losses of steps over all ranks."""
    if "ep" in case:
        return [_classified(engine, step) for step in range(first, first + count)]
    if "pp" not in case:
        return saves.steps(engine, first, count, tp)
    return [float(engine.train_batch(_row(step, engine))) for step in range(first, first + count)]


def _classified(engine: Any, step: int) -> float:
    """Return the loss of a step of a model with experts, on this rank's part of four rows."""
    torch.manual_seed(100 * step)
    x, wanted = torch.randn(4, TOKENS, WIDTH), torch.randint(CLASSES, (4,))
    rank, world = dist.get_rank(), dist.get_world_size()
    loss = engine(x.chunk(world)[rank].to(engine.module.first.weight.dtype), wanted.chunk(world)[rank])
    engine.backward(loss)
    engine.step()
    mean = loss.detach().float().clone()
    dist.all_reduce(mean)
    return mean.item() / world


def _row(step: int, engine: Any) -> Any:
    """Return this rank's microbatches of a batch."""
    parts = batch(step, 2 * rows.PARTS).chunk(rows.PARTS)
    ways = dist.get_world_size() // 2
    return iter([share(part, dist.get_rank(engine.data_parallel_group), ways) * 2 for part in parts])


def begin(deepspeed: Any, root: Path, kind: str) -> list[list[float]]:
    """Run, save and continue every case of a kind; return the losses after the save."""
    import deepspeed.pipe as pipe
    from deepspeed.moe.layer import MoE

    told = []
    for number, case in cases_of(kind):
        model, world = build(case, pipe, MoE), dist.get_world_size()
        config = {
            **config_of(case, world, case["tp"], case["stage"]),
            "zero_force_ds_cpu_optimizer": False,
        }
        engine = deepspeed.initialize(model=model, config=config, **arguments_of(case, model))[0]
        steps(engine, case, case["tp"], 0, BEFORE)
        engine.save_checkpoint(str(root / str(number)))
        told.append(steps(engine, case, case["tp"], BEFORE, AFTER))
        # Without the layer files it is unknown which layers are tied.
        # DeepSpeed does not convert experts.
        left = ("pp" in case and case["kind"] == "tied") or "ep" in case
        if case["stage"] and dist.get_rank() == 0 and not left:
            _convert(root / str(number))
        dist.barrier()
        engine.destroy()
    return told


def _convert(root: Path) -> None:
    """Write the universal checkpoint next to the original one."""
    from deepspeed.checkpoint.ds_to_universal import main

    tag = (root / "latest").read_text()
    out = root.with_name(f"{root.name}-universal")
    out.mkdir()
    main(
        Namespace(
            **{
                "input_folder": str(root / tag),
                "output_folder": str(out / tag),
                "inject_missing_state": True,
            },
            **{"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True},
        )
    )
