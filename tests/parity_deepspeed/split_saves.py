"""Runs of split models (AutoTP, PipelineModule) that the real DeepSpeed begins and saves; universal copies of them."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.parity_deepspeed import rows, saves
from tests.pool.reference import batch, share

BEFORE, AFTER = saves.BEFORE, saves.AFTER
CASES: list[dict[str, Any]] = [
    {"tp": 2, "stage": 0, "kind": "plain"},
    {"tp": 2, "stage": 1, "kind": "groups"},
    {"tp": 2, "stage": 2, "kind": "plain", "dtype": "bf16"},
    {"tp": 2, "stage": 3, "kind": "plain"},
    # Runs of one kind share processes: DeepSpeed's groups of a split model change what a PipelineModule does later.
    {"tp": 1, "pp": 2, "stage": 0, "kind": "plain"},
    {"tp": 1, "pp": 2, "stage": 1, "kind": "tied"},
    {"tp": 1, "pp": 2, "stage": 1, "kind": "plain", "dtype": "bf16"},
]


def cases_of(kind: str) -> list[tuple[int, dict[str, Any]]]:
    """The cases of a kind, with their numbers."""
    return [(number, case) for number, case in enumerate(CASES) if ("pp" in case) == (kind == "pp")]


def config_of(case: dict[str, Any], world: int, tp: int, stage: int) -> dict[str, Any]:
    if "pp" in case:
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
    if case.get("dtype") and "pp" in case:  # its own class then, with files of its own
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def build(case: dict[str, Any], pipe: Any, seed: int = 0) -> Any:
    if "pp" in case:
        torch.manual_seed(seed)
        return rows.module_of(pipe, tied=case["kind"] == "tied")
    return saves.model_of(case, seed)


def arguments_of(case: dict[str, Any], model: Any) -> dict[str, Any]:
    return {"model_parameters": list(model.parameters())} if "pp" in case else saves.arguments_of(case, model)


def steps(engine: Any, case: dict[str, Any], tp: int, first: int, count: int) -> list[float]:
    """Losses of steps over all ranks."""
    if "pp" not in case:
        return saves.steps(engine, first, count, tp)
    return [float(engine.train_batch(_row(step, engine))) for step in range(first, first + count)]


def _row(step: int, engine: Any) -> Any:
    """Microbatches of this rank's part of a batch."""
    parts = batch(step, 2 * rows.PARTS).chunk(rows.PARTS)
    ways = dist.get_world_size() // 2
    return iter([share(part, dist.get_rank(engine.data_parallel_group), ways) * 2 for part in parts])


def begin(deepspeed: Any, root: Path, kind: str) -> list[list[float]]:
    """Run, save and go on with every case of a kind, "tp" or "pp"; return the losses after the save."""
    import deepspeed.pipe as pipe

    told = []
    for number, case in cases_of(kind):
        model, world = build(case, pipe), dist.get_world_size()
        config = {
            **config_of(case, world, case["tp"], case["stage"]),
            "zero_force_ds_cpu_optimizer": False,
        }
        engine = deepspeed.initialize(model=model, config=config, **arguments_of(case, model))[0]
        steps(engine, case, case["tp"], 0, BEFORE)
        engine.save_checkpoint(str(root / str(number)))
        told.append(steps(engine, case, case["tp"], BEFORE, AFTER))
        # Without the files of layers nothing says which layers are tied.
        if case["stage"] and dist.get_rank() == 0 and not ("pp" in case and case["kind"] == "tied"):
            _convert(root / str(number))
        dist.barrier()
        engine.destroy()
    return told


def _convert(root: Path) -> None:
    """Write the universal layout of a checkpoint into a directory beside it."""
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
