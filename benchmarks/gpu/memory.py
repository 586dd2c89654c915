"""Compare the estimate with the memory that torch's allocator used on a GPU.

    python -m benchmarks.gpu.memory [TEXT ...]

Prints one line of JSON for each run whose name contains one of the TEXTs. On a CPU the runs are the same, but their
memory is not reported.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

import launcher
from benchmarks.gpu.ranks import DEVICE, MARK, run
from launcher.config import load
from launcher.estimate.attention_kernels import CPU_KERNELS, GPU_KERNELS
from launcher.estimate.estimator import Estimator
from launcher.estimate.model_trace import microbatch

ON_GPU = DEVICE == "cuda"
ROWS, TOKENS = (2, 2048) if ON_GPU else (2, 256)
WIDTH = 2048 if ON_GPU else 128
_CPU = {"device": "cpu"}
BF16: dict[str, Any] = {"bf16": {"enabled": True}}


class Mode(NamedTuple):
    """A run."""

    name: str
    world: int
    stage: int
    sections: dict[str, Any]
    zero: dict[str, Any] = {}  # noqa: RUF012  (never modified)
    model: str = "llama"
    microbatches: int = 1

    @property
    def json(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": self.microbatches,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": self.stage, **self.zero},
            **self.sections,
        }

    @property
    def architecture(self) -> PretrainedConfig:
        fields: dict[str, Any] = {
            "hidden_size": WIDTH,
            "intermediate_size": 11 * WIDTH // 4,
            "num_hidden_layers": 8,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "vocab_size": 32_000 if ON_GPU else 1000,
            "max_position_embeddings": 4096,
            "use_cache": False,
        }
        if self.model == "mixtral":
            fields |= {"num_local_experts": 8, "num_hidden_layers": 4, "intermediate_size": WIDTH}
        if self.model == "wide":
            return AutoConfig.for_model("llama", **{**fields, "vocab_size": 151_936 if ON_GPU else 4000})
        return AutoConfig.for_model(self.model, **fields)


MODES = (
    Mode("stage 0, fp32", 1, 0, {}),
    Mode("stage 0, bf16", 1, 0, BF16),
    Mode("stage 2, fp16", 1, 2, {"fp16": {"enabled": True}}),
    Mode("stage 3, bf16, recomputed", 1, 3, {**BF16, "activation_checkpointing": {}}),
    Mode("stage 3, bf16, 152 k tokens in the vocabulary", 1, 3, BF16, model="wide"),
    Mode("stage 3, bf16, 152 k tokens, tiled loss", 1, 3, {**BF16, "tiled_loss": True}, model="wide"),
    Mode("stage 2, optimizer on the host", 1, 2, BF16, {"offload_optimizer": _CPU}),
    Mode("stage 3, all on the host", 1, 3, BF16, {"offload_optimizer": _CPU, "offload_param": _CPU}),
    Mode("stage 1, bf16", 2, 1, BF16),
    Mode("stage 2, bf16, two microbatches", 2, 2, BF16, microbatches=2),
    Mode("stage 3, bf16", 2, 3, BF16),
    Mode("stage 1, tp 2", 2, 1, {**BF16, "tensor_parallel": {"autotp_size": 2}}),
    Mode("stage 1, pp 2", 2, 1, {**BF16, "pipeline": {"stages": 2}}, microbatches=4),
    Mode("stage 3, cp 2", 2, 3, {**BF16, "sequence_parallel_size": 2}),
    Mode("stage 1, ep 2", 2, 1, {**BF16, "expert_parallel": {"size": 2}}, model="mixtral"),
)


def measure(mode: Mode) -> dict[str, Any]:
    """Return the bytes of this rank in its third step, and the memory of its process on the card."""
    others = _used() if ON_GPU else 0
    launcher.comm.init_distributed()
    config = mode.architecture
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    engine: Any = launcher.initialize(model=model, config=mode.json)[0]
    batches = [microbatch(engine.module, ROWS, TOKENS)] * mode.microbatches
    for step in range(3):
        if step == 2 and ON_GPU:
            gc.collect()
            torch.cuda.synchronize()
            between = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        began = time.monotonic()
        loss = float(engine.train_batch(iter(batches)))
    found = {"loss": loss, "seconds": time.monotonic() - began}
    if ON_GPU:
        found |= {
            "peak": torch.cuda.max_memory_allocated(),
            "between": between,
            "reserved": torch.cuda.max_memory_reserved(),
            "card": _used() - others,  # of both ranks, if they share it
        }
    engine.destroy()
    return found


def _used() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def row(mode: Mode) -> dict[str, Any]:
    """Run a mode, and estimate each of its ranks."""
    try:
        found = [json.loads(line) for line in run("benchmarks.gpu.memory", ["--mode", mode.name], mode.world)]
    except RuntimeError as error:
        return {"mode": mode.name, "ranks": mode.world, "failed": str(error)}
    estimator = Estimator(mode.architecture, attention=GPU_KERNELS if ON_GPU else CPU_KERNELS)
    config = load(mode.json)
    for rank, each in enumerate(found):
        estimate = estimator.estimate(config, mode.world, rank, TOKENS)
        each |= {"estimated": estimate.peak, "estimated_between": estimate.between.total}
    return {"mode": mode.name, "ranks": mode.world, "found": found}


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--mode"]:
        mode = next(mode for mode in MODES if mode.name == arguments[1])
        print(MARK + json.dumps(measure(mode)), flush=True)
        return
    for mode in MODES:
        if not arguments or any(text in mode.name for text in arguments):
            print(json.dumps(row(mode)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
