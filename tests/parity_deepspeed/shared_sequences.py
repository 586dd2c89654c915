"""Compare sequence parallelism as in DeepSpeed's tutorial (ALST), on DeepSpeed and on ours, with a single process:

    python -m tests.parity_deepspeed.shared_sequences [--family NAME ...] [--length 24] [--batch KIND ...]

For each model family and each kind of batch, prints the difference of loss and gradients from a single process in fp64.
Two ranks, stage 3, fp32.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
from torch import Tensor
from torch.utils.data import DataLoader

from tests.sequence.families import BATCHES, FAMILIES, VOCAB, model_of

RANKS, ROWS = 2, 2
SIDES = ("ours", "DeepSpeed")


def names_of(side: str) -> SimpleNamespace:
    """Return the names that a script imports from `deepspeed`."""
    if side == "ours":
        import launcher
        from launcher.engine.fragments import safe_get_full_grad
        from launcher.integrations import groups, ulysses

        return SimpleNamespace(
            initialize=launcher.initialize,
            groups=groups,
            register=ulysses.UlyssesSPAttentionHF.register_with_transformers,
            adapter=ulysses.UlyssesSPDataLoaderAdapter,
            gradient=safe_get_full_grad,
        )
    import deepspeed
    from deepspeed.runtime.sequence_parallel import ulysses_sp
    from deepspeed.utils import groups as their_groups

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    return SimpleNamespace(
        initialize=deepspeed.initialize,
        groups=their_groups,
        register=ulysses_sp.UlyssesSPAttentionHF.register_with_transformers,
        adapter=ulysses_sp.UlyssesSPDataLoaderAdapter,
        gradient=deepspeed.utils.safe_get_full_grad,
    )


def measured(side: str, family: str, kinds: list[str], length: int) -> dict[str, list[float] | str]:
    """Return kind of batch -> [difference of the loss, of the gradients], or the error."""
    names = names_of(side)
    model = model_of(family)
    mpu = names.register(
        model_name_or_path=model,
        core_attn_implementation=model.config._attn_implementation,
        sequence_parallel_size=RANKS,
        micro_batch_size=ROWS,
        seq_length=length,
        seq_length_is_variable=True,
    )
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "sequence_parallel_size": RANKS,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine = names.initialize(model=model, model_parameters=list(model.parameters()), config=config, mpu=mpu)[
        0
    ]
    found: dict[str, list[float] | str] = {}
    for kind in kinds:
        batch = BATCHES[kind](0, length)
        try:
            loss, gradients = on_slices(names, engine, batch)
        except Exception as error:
            found[kind] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"
            break  # the engine is in the middle of a step
        wanted, truth = of_one_process(family, batch)
        of_loss = abs(loss - wanted) / wanted
        missed = sum(
            float((gradients[name].double() - value).square().sum()) for name, value in truth.items()
        )
        found[kind] = [
            of_loss,
            (missed / sum(float(value.square().sum()) for value in truth.values())) ** 0.5,
        ]
    return found


def on_slices(
    names: SimpleNamespace, engine: Any, batch: dict[str, Tensor]
) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and the gradients of a batch that every rank's loader yields."""
    group, rank = names.groups._get_sequence_parallel_group(), names.groups._get_sequence_parallel_rank()
    batch = {**batch}
    if "position_ids" not in batch:  # DeepSpeed's adapter needs them
        batch["position_ids"] = (
            torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"]).contiguous()
        )
    loader = names.adapter(
        DataLoader([batch], batch_size=None),
        sp_rank=rank,
        sp_group=group,
        sp_world_size=RANKS,
        device=engine.device,
    )
    mine = next(iter(loader))
    outputs = engine(**mine)
    labels = mine[
        "shift_labels"
    ].contiguous()  # DeepSpeed's adapter gives a view that the loss cannot flatten
    loss = engine.module.loss_function(
        logits=outputs.logits, labels=None, shift_labels=labels, vocab_size=VOCAB
    )
    tokens = (labels != -100).sum()
    losses = collectives.all_gather(loss, group=group)  # type: ignore[no-untyped-call]
    every = collectives.all_gather(tokens, group=group)  # type: ignore[no-untyped-call]
    total = sum(each * number for each, number in zip(losses, every, strict=True) if number) / sum(every)
    engine.backward(total)
    gradients = {name: names.gradient(value) for name, value in engine.module.named_parameters()}
    gradients = {name: value.detach().clone() for name, value in gradients.items() if value is not None}
    engine.step()
    return float(total.detach()), gradients


def of_one_process(family: str, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Return the same in plain PyTorch, in fp64."""
    model = model_of(family).double()
    loss = model(**batch).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", nargs="*", choices=FAMILIES, default=[f for f in FAMILIES if f != "deep"])
    parser.add_argument("--batch", nargs="*", choices=BATCHES, default=list(BATCHES))
    parser.add_argument("--side", nargs="*", choices=SIDES, default=list(SIDES))
    parser.add_argument("--length", type=int, default=24)
    parser.add_argument("--rank", nargs=2, metavar=("SIDE", "OUT"), help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.rank:
        side, out = flags.rank
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        found = {family: measured(side, family, flags.batch, flags.length) for family in flags.family}
        if os.environ["RANK"] == "0":
            Path(out).write_text(json.dumps(found))
        return
    print(f"| model | batch |{''.join(f' {side}: loss | gradients |' for side in flags.side)}")
    print(f"|---|---|{'---|---|' * len(flags.side)}")
    for family in flags.family:
        rows = {side: on_ranks(side, family, flags) for side in flags.side}
        for kind in flags.batch:
            cells = [_cells(rows[side].get(kind, "not reached")) for side in flags.side]
            print(f"| {family} | {kind} | {' | '.join(cells)} |", flush=True)


def on_ranks(side: str, family: str, flags: argparse.Namespace) -> dict[str, list[float] | str]:
    """Run each rank in its own process, because DeepSpeed changes transformers for all models of a process."""
    from tests.parity_deepspeed.conftest import run_ranks

    with tempfile.TemporaryDirectory() as name:
        out, logs = Path(name, "out.json"), [Path(name, f"rank{rank}.log") for rank in range(RANKS)]
        command = [sys.executable, "-m", "tests.parity_deepspeed.shared_sequences", "--rank", side, str(out)]
        command += ["--family", family, "--length", str(flags.length), "--batch", *flags.batch]
        try:
            run_ranks(command, RANKS, logs)
        except AssertionError as error:
            last = next(
                (line for line in reversed(str(error).splitlines()) if "Error" in line), str(error)[-160:]
            )
            return dict.fromkeys(flags.batch, last.strip()[:160])
        found: dict[str, dict[str, list[float] | str]] = json.loads(out.read_text())
        return found[family]


def _cells(found: list[float] | str) -> str:
    return f"{found} | " if isinstance(found, str) else f"{found[0]:.1e} | {found[1]:.1e}"


if __name__ == "__main__":
    main()
