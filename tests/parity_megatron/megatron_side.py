"""What Megatron-Core does, in processes of its own and on CPUs, for which its calls of CUDA are turned away.

python -m tests.parity_megatron.megatron_side begin|go_on CASES.json OUT.json       (RANK, WORLD_SIZE, ... set)

`begin` trains, saves and trains on; `go_on` loads what launcher exported, and trains. Both write the losses.
"""

from __future__ import annotations

import contextlib
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.parity_megatron.runs import AFTER, BEFORE, DECAY, MODELS, RATE, ROWS, batch


class _OnCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class _Nothing:
    """A stream or an event: whatever is asked of it."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: _Nothing()


class _Tracker:
    def fork(self, *args: Any) -> Any:
        return contextlib.nullcontext()


class FusedAdam(torch.optim.Optimizer):
    """AdamW as Apex has it: the count of steps is in the param group. Over torch's own, Megatron's distributed
    optimizer cannot load what it saved."""

    def __init__(self, params: Any, adam_w_mode: bool = True, **options: Any) -> None:
        assert adam_w_mode
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            one, two = group["betas"]
            for param in (p for p in group["params"] if p.grad is not None):
                state = self.state[param]
                for key in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(key, torch.zeros_like(param))
                param.mul_(1 - group["lr"] * group["weight_decay"])
                state["exp_avg"].lerp_(param.grad, 1 - one)
                state["exp_avg_sq"].mul_(two).addcmul_(param.grad, param.grad, value=1 - two)
                size = group["lr"] / (1 - one ** group["step"])
                root = (state["exp_avg_sq"].sqrt() / (1 - two ** group["step"]) ** 0.5).add_(group["eps"])
                param.addcdiv_(state["exp_avg"], root, value=-size)


def _choose_adam(*, fused: bool) -> None:
    import megatron.core.optimizer as optimizer
    from megatron.core.optimizer import distrib_optimizer

    adam = FusedAdam if fused else torch.optim.AdamW
    vars(optimizer).update(Adam=adam, USING_PYTORCH_OPTIMIZER=not fused)
    vars(distrib_optimizer).update(Adam=adam, HAVE_APEX_OR_TE=fused, USING_APEX_OPTIMIZER=fused)


def _without_cuda() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.synchronize = lambda *args: None
    cuda.Stream = cuda.Event = cuda.current_stream = lambda *args, **kwargs: _Nothing()
    cuda.stream = lambda *args: contextlib.nullcontext()
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *args, **kwargs: self
    tensor.record_stream = lambda *args: None
    type_of = torch.Tensor.type
    tensor.type = lambda self, *args, **kwargs: (
        type_of(self, *args, **kwargs) if args or kwargs else f"torch.cuda.{type_of(self).rpartition('.')[2]}"
    )
    from megatron.core import tensor_parallel
    from megatron.core.transformer.moe import moe_utils

    tensor_parallel.get_cuda_rng_tracker = lambda *args, **kwargs: _Tracker()
    vars(moe_utils).setdefault("te_general_gemm", None)  # without Transformer Engine it has no such name


def _model(case: dict[str, Any]) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    told = MODELS[case["model"]]
    is_gpt2, experts = (
        told["model_type"] == "gpt2",
        told.get("num_local_experts") or told.get("num_experts"),
    )
    tied = told.get("tie_word_embeddings", is_gpt2)
    options: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "tensor_model_parallel_size": case["tp"],
        "pipeline_model_parallel_size": case["pp"],
        "pipeline_dtype": torch.float32,
        "use_cpu_initialization": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "init_method_std": 0.1,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
    }
    if is_gpt2:
        options |= {
            "ffn_hidden_size": 128,
            "normalization": "LayerNorm",
            "activation_func": partial(F.gelu, approximate="tanh"),
        }
    else:
        options |= {
            "ffn_hidden_size": 48,
            "num_query_groups": told["num_key_value_heads"],
            "kv_channels": told["head_dim"],
            "normalization": "RMSNorm",
            "gated_linear_unit": True,
            "activation_func": F.silu,
            "add_bias_linear": bool(told.get("mlp_bias")),
            "add_qkv_bias": told["model_type"] == "qwen2",
            "qk_layernorm": told["model_type"].startswith("qwen3"),
        }
    if experts:
        options |= {
            "num_moe_experts": experts,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": told.get("moe_intermediate_size", 48),
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "none",
        }
    if case.get("dtype"):
        options |= {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
    config = TransformerConfig(**options)
    spec = get_gpt_layer_local_spec(
        num_experts=experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    torch.manual_seed(3)
    model = GPTModel(
        config,
        spec,
        vocab_size=96,
        max_sequence_length=64,
        position_embedding_type="learned_absolute" if is_gpt2 else "rope",
        share_embeddings_and_output_weights=tied,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    return config, model.bfloat16() if case.get("dtype") else model


class _Run:
    """A model that is trained."""

    def __init__(self, case: dict[str, Any]) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self.case, spread = case, case["optimizer"] == "distributed"
        _choose_adam(fused=spread)
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(case["tp"], case["pp"])
        self.config, self.bare = _model(case)
        self.config.finalize_model_grads_func = finalize_model_grads
        wrapping = DistributedDataParallelConfig(
            use_distributed_optimizer=spread, grad_reduce_in_fp32=True, overlap_grad_reduce=False
        )
        self.model = DistributedDataParallel(self.config, wrapping, self.bare)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=RATE,
                weight_decay=DECAY,
                clip_grad=0.0,
                bf16=bool(case.get("dtype")),
                params_dtype=torch.bfloat16 if case.get("dtype") else torch.float32,
                use_distributed_optimizer=spread,
            ),
            [self.model],
        )
        for group in self.optimizer.param_groups:  # as Megatron's schedule does at each step
            group["weight_decay"] = DECAY * group["wd_mult"]

    def steps(self, first: int, count: int) -> list[float]:
        return [self._step(step) for step in range(first, first + count)]

    def _step(self, step: int) -> float:
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        rank, ways = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        rows = batch(step).chunk(ways)[rank]
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        told = get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=iter([rows]),
            model=[self.model],
            num_microbatches=1,
            seq_length=rows.shape[1] - 1,
            micro_batch_size=ROWS // ways,
            forward_only=False,
        )
        self.optimizer.step()
        total = torch.zeros(2)
        if told and parallel_state.get_tensor_model_parallel_rank() == 0:
            total += torch.tensor([float(told[0]["loss"]), 1.0])
        dist.all_reduce(total)
        return (total[0] / total[1]).item()

    def state(self, *, loading: bool = False) -> dict[str, Any]:
        """The sharded state as Megatron-LM saves it."""
        metadata = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
        model = self.bare.sharded_state_dict()
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
        return {"model": model, "optimizer": optimizer}


def _forward(rows: Any, model: Any) -> tuple[Tensor, Any]:
    tokens: Tensor = next(rows)
    places = torch.arange(tokens.shape[1] - 1)[None].expand(tokens.shape[0], -1)
    out = model(tokens[:, :-1].contiguous(), places, None, labels=tokens[:, 1:].contiguous())

    def mean(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = losses.float().mean()
        return loss, {"loss": loss.detach()}

    return out, mean


def begin(case: dict[str, Any], place: Path) -> list[float]:
    from argparse import Namespace

    from megatron.core import dist_checkpointing

    run = _Run(case)
    run.steps(0, BEFORE)
    directory = place / f"iter_{BEFORE:07d}"
    args = Namespace(
        num_attention_heads=4,
        num_query_groups=run.config.num_query_groups,
        group_query_attention=run.config.num_query_groups != 4,
        consumed_train_samples=BEFORE * ROWS,
        params_dtype=torch.float32,
        attention_backend=run.config.attention_backend,
    )
    if dist.get_rank() == 0:
        directory.mkdir(parents=True)
        (place / "latest_checkpointed_iteration.txt").write_text(str(BEFORE))
    dist.barrier()
    state = {
        **run.state(),
        "iteration": BEFORE,
        "checkpoint_version": 3.0,
        "args": args,
        "num_floating_point_operations_so_far": 1.0,
    }
    dist_checkpointing.save(state, str(directory))
    return run.steps(BEFORE, AFTER)


def go_on(case: dict[str, Any], place: Path) -> list[float]:
    from megatron.core import dist_checkpointing
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    run = _Run(case)
    directory = place / f"iter_{BEFORE:07d}"
    state = dist_checkpointing.load(run.state(loading=True), str(directory))
    assert state["iteration"] == BEFORE
    run.bare.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    schedule = OptimizerParamScheduler(
        run.optimizer,
        init_lr=0.0,
        max_lr=RATE,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=100,
        lr_decay_style="constant",
        start_wd=DECAY,
        end_wd=DECAY,
        wd_incr_steps=100,
        wd_incr_style="constant",
        override_opt_param_scheduler=True,
        use_checkpoint_opt_param_scheduler=False,
    )
    schedule.load_state_dict(state["opt_param_scheduler"])
    assert schedule.num_steps == state["args"].consumed_train_samples == BEFORE * ROWS
    for group in run.optimizer.param_groups:
        assert group["lr"] == RATE and group["weight_decay"] == DECAY * group["wd_mult"]
    return run.steps(BEFORE, AFTER)


def main() -> None:
    task, source, out = sys.argv[1:]
    given = json.loads(Path(source).read_text())
    _OnCpu().__enter__()
    _without_cuda()
    dist.init_process_group("gloo")
    do = {"begin": begin, "go_on": go_on}[task]
    losses = [do(case, Path(place)) for case, place in given]
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(losses))
    dist.barrier()


if __name__ == "__main__":
    main()
