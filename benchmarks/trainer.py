"""Compare Hugging Face's Trainer on our engine and on DeepSpeed: the same script and JSON, stage by stage.

    python -m benchmarks.trainer --model small --turns 3

Two ranks with one thread each. Prints the median step time of each, and our speedup per turn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.sweep import MARK, _free_port, wait_until_idle
from benchmarks.workload import SIZES, Text, llama_config

WHO = ("ours", "deepspeed")
LIMIT_S, SEQUENCE, MICRO, ACCUMULATION = 170.0, 128, 2, 1
AUTO = "auto"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    made.add_argument("--model", choices=SIZES, default="small")
    made.add_argument("--stage", type=int, action="append", choices=range(4), help="default: all four")
    made.add_argument("--turns", type=int, default=3)
    made.add_argument("--steps", type=int, default=8)
    made.add_argument("--warmup", type=int, default=3)
    made.add_argument("--who", choices=WHO, help="one rank of one run; for this program itself")
    return made


# ---- one rank -------------------------------------------------------------------------------------


def work(args: argparse.Namespace) -> None:
    """Train, and print `RESULT {milliseconds, losses}` on rank 0."""
    if args.who == "ours":
        from launcher.integrations.transformers import enable

        enable()
    import torch
    from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    torch.set_num_threads(1)

    class Clock(TrainerCallback):
        """Record the times at which steps end."""

        times: list[float] = []  # noqa: RUF012

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.times.append(time.perf_counter())

    zero = {
        "stage": args.stage[0],
        "overlap_comm": False,  # DeepSpeed has no streams for overlap on CPUs
        "reduce_bucket_size": AUTO,
        "stage3_prefetch_bucket_size": AUTO,
        "stage3_param_persistence_threshold": AUTO,
    }
    if args.who == "ours":
        del zero["overlap_comm"]
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = {**dict.fromkeys(keys, AUTO), "gradient_clipping": AUTO, "zero_optimization": zero}
    text, steps = Text(SEQUENCE), args.warmup + args.steps
    rows = [{"input_ids": (row := text.sequence(i)), "labels": row} for i in range(steps * MICRO * 2)]
    with tempfile.TemporaryDirectory() as directory:
        given = TrainingArguments(
            directory, per_device_train_batch_size=MICRO, gradient_accumulation_steps=ACCUMULATION, max_steps=steps,
            logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, deepspeed=config,
            learning_rate=1e-3, weight_decay=0.01,
        )  # fmt: skip
        torch.manual_seed(0)
        trainer = Trainer(
            LlamaForCausalLM(llama_config(args.model)), given, train_dataset=rows, callbacks=[Clock()]
        )
        trainer.train()
    if given.process_index == 0:
        spans = [later - sooner for sooner, later in zip(Clock.times, Clock.times[1:], strict=False)]
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        ms = 1e3 * statistics.median(spans[args.warmup - 1 :])
        print(MARK + json.dumps({"ms": ms, "losses": losses}), flush=True)


# ---- all runs -------------------------------------------------------------------------------------


def run(who: str, stage: int, args: argparse.Namespace) -> dict[str, Any]:
    """Run once on two ranks."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", _free_port(),
        "-m", "benchmarks.trainer", "--who", who, "--stage", str(stage), "--model", args.model,
        "--steps", str(args.steps), "--warmup", str(args.warmup),
    ]  # fmt: skip
    root = str(Path(__file__).resolve().parents[1])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": root}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    results = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not results:
        sys.exit(f"{who}, stage {stage}:\n{done.stdout[-1500:]}{done.stderr[-3000:]}")
    record: dict[str, Any] = json.loads(results[-1].removeprefix(MARK))
    return record


def main() -> None:
    args = parser().parse_args()
    if args.who:
        return work(args)
    for stage in args.stage or range(4):
        ms: dict[str, list[float]] = {who: [] for who in WHO}
        off = 0.0
        for _ in range(args.turns):
            records = {}
            for who in WHO:
                wait_until_idle()
                records[who] = run(who, stage, args)
                ms[who].append(records[who]["ms"])
            pairs = zip(*(records[who]["losses"] for who in WHO), strict=True)
            off = max(off, *(abs(a - b) / b for a, b in pairs))
        ratios = [theirs / ours for ours, theirs in zip(*ms.values(), strict=True)]
        print(
            f"stage {stage}: ours {statistics.median(ms['ours']):.0f} ms, DeepSpeed "
            f"{statistics.median(ms['deepspeed']):.0f} ms, {statistics.median(ratios):.2f} x "
            f"({', '.join(f'{ratio:.2f}' for ratio in ratios)}), losses differ by {off:.0e}",
            flush=True,
        )


if __name__ == "__main__":
    main()
