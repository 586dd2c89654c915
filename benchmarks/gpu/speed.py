"""Compare steps on one GPU: ours, plain PyTorch, FSDP2 and DeepSpeed.

    python -m benchmarks.gpu.speed [--profile] [TEXT ...]

Prints one line of JSON for each row whose name contains one of the TEXTs; with --profile, also the slowest kernels. All
train the same model on the same tokens in bf16, with AdamW in fp32. MFU counts 6 operations per parameter and token,
plus attention (causal: half of all pairs), relative to the peak of the card (`launcher/monitor/devices.py`).
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu.ranks import DEVICE, environment, free_port

ON_GPU = DEVICE == "cuda"
WARMUP, STEPS = (3, 8) if ON_GPU else (1, 2)
LR = 1e-4
TOP = 8  # experts per token
Step = Callable[[], Tensor]


class Shape(NamedTuple):
    """A Llama and its batch size."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    rows: int
    tokens: int
    vocabulary: int = 32_000
    experts: int = 0  # each token uses 8 of them


SHAPES = {
    "8B blocks": Shape(4096, 6, 14_336, 32, 2, 4096),  # Llama 3.1's
    "30B-A3B blocks": Shape(2048, 6, 768, 32, 4, 4096, experts=128),  # Qwen3's
    "tiny": Shape(128, 2, 256, 4, 2, 128, 512),
}


class Row(NamedTuple):
    """A way to train a shape."""

    name: str
    peer: str
    shape: str
    options: dict[str, Any] = {}  # noqa: RUF012  (never modified)


_CPU = {"device": "cpu"}
_OFFLOAD = {"stage": 2, "offload_optimizer": _CPU}
ROWS = (
    Row("plain, autocast", "plain", "8B blocks"),
    Row("ours, stage 0", "ours", "8B blocks", {"zero": {"stage": 0}}),
    Row("ours, stage 2", "ours", "8B blocks", {"zero": {"stage": 2}}),
    Row("ours, stage 3", "ours", "8B blocks", {"zero": {"stage": 3}}),
    Row("FSDP2", "fsdp2", "8B blocks"),
    Row("DeepSpeed, stage 3", "deepspeed", "8B blocks", {"zero": {"stage": 3}}),
    Row("plain, autocast, compiled", "plain", "8B blocks", {"compile": True}),
    Row("ours, stage 3, compiled", "ours", "8B blocks", {"zero": {"stage": 3}, "compile": True}),
    Row("plain, mixture", "plain", "30B-A3B blocks"),
    Row("ours, mixture, stage 2", "ours", "30B-A3B blocks", {"zero": {"stage": 2}}),
    Row(
        "ours, all on the host",
        "ours",
        "8B blocks",
        {"zero": {"stage": 3, "offload_optimizer": _CPU, "offload_param": _CPU}},
    ),
    Row("ours, optimizer on the host", "ours", "8B blocks", {"zero": _OFFLOAD}),
    Row("DeepSpeed, optimizer on the host", "deepspeed", "8B blocks", {"zero": _OFFLOAD}),
)


def model_of(shape: Shape) -> nn.Module:
    """Return the model in fp32, on the device."""
    torch.manual_seed(0)
    kind, more = "llama", {}
    if shape.experts:
        kind = "qwen3_moe"
        more = {
            "num_experts": shape.experts,
            "num_experts_per_tok": TOP,
            "moe_intermediate_size": shape.intermediate,
        }
        more |= {"head_dim": 128, "output_router_logits": False}
    config = AutoConfig.for_model(
        kind, hidden_size=shape.hidden, num_hidden_layers=shape.layers, intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads, num_key_value_heads=max(1, shape.heads // 4), vocab_size=shape.vocabulary,
        max_position_embeddings=shape.tokens, use_cache=False, tie_word_embeddings=False, **more,
    )  # fmt: skip
    with torch.device(DEVICE):
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()


def operations(shape: Shape, parameters: int) -> float:
    """Return the operations of a step: forward and backward."""
    tokens = shape.rows * shape.tokens
    products = parameters - shape.vocabulary * shape.hidden  # the embedding is not a matrix product
    if shape.experts:
        products -= shape.layers * (shape.experts - TOP) * 3 * shape.hidden * shape.intermediate
    heads = shape.heads * (128 if shape.experts else shape.hidden // shape.heads)
    return tokens * (6 * products + 6 * shape.layers * shape.tokens * heads)


def plain(model: nn.Module, ids: Tensor, options: dict[str, Any]) -> Step:
    """Return a step with fp32 weights under autocast."""
    if options.get("compile"):
        for block in model.model.layers:  # type: ignore[attr-defined,union-attr]
            block.compile()

    return _looped(model, ids, lambda: torch.autocast(DEVICE, torch.bfloat16))


def fsdp2(model: nn.Module, ids: Tensor, options: dict[str, Any]) -> Step:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from launcher.comm import init_distributed

    init_distributed()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.model.layers:  # type: ignore[attr-defined,union-attr]
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return _looped(model, ids, nullcontext)


def _looped(model: nn.Module, ids: Tensor, context: Callable[[], AbstractContextManager[Any]]) -> Step:
    """Return a step of plain PyTorch whose forward runs in a context."""
    adamw = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step() -> Tensor:
        with context():
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        adamw.step()
        adamw.zero_grad()
        return loss.detach()  # type: ignore[no-any-return]

    return step


def config_of(shape: Shape, options: dict[str, Any]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": shape.rows,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        "gradient_clipping": 0.0,
        "zero_optimization": options["zero"],
        "steps_per_print": 10**9,
    }


def _stepped(engine: Any, ids: Tensor) -> Step:
    def step() -> Tensor:
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()  # type: ignore[no-any-return]

    return step


def ours(model: nn.Module, ids: Tensor, options: dict[str, Any]) -> Step:
    import launcher

    config = config_of(SHAPES[options["shape"]], options)
    if options.get("compile"):
        config["compile"] = {"enabled": True}
    return _stepped(launcher.initialize(model=model, config=config)[0], ids)


def deepspeed(model: nn.Module, ids: Tensor, options: dict[str, Any]) -> Step:
    import logging

    import deepspeed as peer

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    config = config_of(SHAPES[options["shape"]], options)
    if "offload_optimizer" not in options["zero"]:
        # its own kernel takes minutes to compile; torch's is fused as well
        adamw = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
        del config["optimizer"]
        return _stepped(peer.initialize(model=model, optimizer=adamw, config=config)[0], ids)
    parameters = list(model.parameters())
    return _stepped(peer.initialize(model=model, model_parameters=parameters, config=config)[0], ids)


PEERS = {"plain": plain, "fsdp2": fsdp2, "deepspeed": deepspeed, "ours": ours}


def measure(row: Row, profile: bool) -> dict[str, Any]:
    """Return the seconds per step, and the derived numbers."""
    name = row.shape if ON_GPU else "tiny"
    shape = SHAPES[name]
    model = model_of(shape)
    parameters = sum(p.numel() for p in model.parameters())
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(shape.vocabulary, (shape.rows, shape.tokens), generator=generator).to(DEVICE)
    step = PEERS[row.peer](model, ids, {**row.options, "shape": name})
    del model
    losses, times = [], []
    for number in range(WARMUP + STEPS):
        began = time.perf_counter()
        losses.append(float(step()))  # waits for the forward
        if ON_GPU:
            torch.cuda.synchronize()
        if number >= WARMUP:
            times.append(time.perf_counter() - began)
    seconds = sorted(times)[len(times) // 2]
    found = {
        "parameters": parameters,
        "loss": losses[-1],
        "seconds": seconds,
        "spread": max(times) - min(times),
        "tokens_per_s": shape.rows * shape.tokens / seconds,
        "tflops": operations(shape, parameters) / seconds / 1e12,
    }
    if profile:
        found["kernels"] = kernels(step)
    return found | ({"peak": torch.cuda.max_memory_allocated()} if ON_GPU else {})


def kernels(step: Step, number: int = 30) -> list[tuple[str, int, float]]:
    """Return the slowest kernels of two steps: (kernel or operation, calls, milliseconds per step)."""
    activities = [torch.profiler.ProfilerActivity.CPU] + ON_GPU * [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(2):
            step()
        if ON_GPU:
            torch.cuda.synchronize()
    each = [(e.key[:100], e.count, e.self_device_time_total / 2e3) for e in profiler.key_averages()]
    return sorted(each, key=lambda kernel: -kernel[2])[:number]


def afresh(row: Row, profile: bool) -> dict[str, Any]:
    """Measure a row in a process that has measured others."""
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch.compiler.reset()
    try:
        return measure(row, profile)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[:500]}


def main(arguments: list[str]) -> None:
    os.environ.update(environment(0, 1, free_port()))
    texts = [text for text in arguments if text != "--profile"]
    for row in ROWS:
        if not texts or any(text in row.name for text in texts):
            found = {"row": row.name, "shape": row.shape, **afresh(row, "--profile" in arguments)}
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
