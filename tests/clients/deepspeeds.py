"""DeepSpeed's own examples, from a checkout of DeepSpeedExamples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.clients.client import Client


def examples() -> list[Client]:
    """Return DeepSpeed's own examples."""
    home, training = "DeepSpeedExamples", "DeepSpeedExamples/training"

    def one(name: str, setting: str, program: str, *arguments: str, needs: str = "", **others: Any) -> Client:
        return Client(
            f"DeepSpeedExamples {name}", setting, home, program, arguments, stand_ins=needs, **others
        )

    flags = ("--deepspeed", "--epochs", "1", "--dtype", "fp32", "--log-interval", "1", "--stage")
    cifar = [
        one("cifar", "fp32", f"{training}/cifar/cifar10_deepspeed.py", *flags, str(stage),
            stage=stage, needs="cifar", local_rank=True)
        for stage in range(4)
    ]  # fmt: skip
    experts = ("--moe", "--ep-world-size", "2", "--moe-param-group", "--top-k", "1", "--num-experts")
    kinds = {
        "experts": ("4", "--noisy-gate-policy", "RSample"),
        "residual experts": ("2", "4", "--mlp-type", "residual"),
    }
    cifar += [
        one("cifar", kind, f"{training}/cifar/cifar10_deepspeed.py", *flags, str(stage), *experts, *more,
            stage=stage, needs="cifar", local_rank=True)
        for (kind, more), stage in zip(kinds.items(), (1, 2), strict=True)
    ]  # fmt: skip
    pipeline = [
        one("pipeline_parallelism", f"-p {degree}{', without dropout' if degree else ''}",
            f"{training}/pipeline_parallelism/train.py", "--deepspeed_config=ds_config.json", "-p", str(degree),
            "--steps", str(2 if degree else 1), "--backend", "gloo",
            needs=f"cifar cuda{' no_dropout' if degree else ''}", local_rank=True)
        for degree in (0, 2)
    ]  # fmt: skip
    tensor = [
        one("tensor_parallel", f"basic_example, tp 2, {precision}",
            f"{training}/tensor_parallel/basic_example/autotp_example.py",
            "--model_name", "{models}/llama-untied", "--tp_size", "2", "--dp_size", "1", "--zero_stage", "1",
            "--precision", precision, "--seq_length", "32", "--num_steps", "3", "--learning_rate", "1e-3",
            stage=1, needs="cuda seed", local_rank=True, limit=1e-2 if precision == "bf16" else 1e-5)
        for precision in ("fp32", "bf16")
    ]  # fmt: skip
    return [
        *cifar,
        one("gan", "FakeData; rounding grows from step to step",
            f"{training}/gan/gan_deepspeed_train.py", "--dataset", "fake", "--ngf", "8",
            "--ndf", "8", "--workers", "0", "--deepspeed_config", "gan_deepspeed_config.json",
            "--tensorboard_path", "{out}", "--outf", "{out}", needs="cuda", local_rank=True, limit=1e-2),
        one("HelloDeepSpeed", "bf16", f"{training}/HelloDeepSpeed/train_bert_ds.py", "--checkpoint_dir", "{out}",
            "--tokenizer", "{models}/llama-tied", "--dtype", "bf16", "--num_iterations", "3", "--batch_size", "4",
            "--num_layers", "2", "--num_heads", "4", "--ff_dim", "64", "--h_dim", "32", "--log_every", "1",
            needs="data", local_rank=True, limit=1e-2),
        *pipeline,
        *tensor,
        *_larger_examples(one),
    ]  # fmt: skip


def _larger_examples(one: Callable[..., Client]) -> list[Client]:
    training, chat = "DeepSpeedExamples/training", "DeepSpeedExamples/applications/DeepSpeed-Chat"
    adam = {"type": "AdamW", "params": {"lr": 1e-3}}
    bf16 = {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1,
            "gradient_clipping": 1.0}  # fmt: skip
    host = {"device": "cpu", "pin_memory": False}
    superoffload = {**host, "ratio": 0.8, "super_offload": True}
    sft = [
        one("DeepSpeed-Chat step 1", f"OPT, SFT, bf16{', LoRA' if lora else ''}",
            f"{chat}/training/step1_supervised_finetuning/main.py", "--model_name_or_path", "{models}/opt-tied",
            "--data_output_path", "{out}/data", "--max_seq_len", "32", "--per_device_train_batch_size", "2",
            "--per_device_eval_batch_size", "4", "--dtype", "bf16", "--zero_stage", str(stage), "--deepspeed",
            "--dropout", "0.0", *(("--lora_dim", "4") if lora else ()),
            stage=stage, needs="data no_init_weights", local_rank=True, limit=1e-2, paths=("{examples}/" + chat,),
            environment={"PYTHONDONTWRITEBYTECODE": "1"})
        for stage, lora in ((2, False), (3, False), (2, True))
    ]  # fmt: skip
    model = ("--model_name", "{models}/llama-untied", "--deepspeed_config", "{json}", "--lr", "1e-3")
    model += ("--batch_size", "2", "--num_train_epochs", "1", "--output_dir", "{out}")
    every_fourth = {"topk_ratio": 0.1, "update_interval": 4, "full_warm_up_rounds": 0, "overlap_step": False}
    zenflow = [
        one("ZenFlow finetuning", f"llama, bf16{', one rank' if ranks == 1 else ''}; DeepSpeed without `zenflow`",
            f"{training}/DeepSpeed-ZenFlow/finetuning/finetune_llama.py", *model,
            stage=2, needs="data", local_rank=True, limit=1e-2, ranks=ranks, without="zenflow",
            ends="" if ranks == 1 else "rank 0 alone saves a checkpoint, which needs every rank",
            sections={**bf16, "train_batch_size": 2 * ranks, "optimizer": adam, "zero_allow_untested_optimizer": True,
                      "zero_optimization": {"offload_optimizer": host, "zenflow": every_fourth}})
        for ranks in (1, 2)
    ]  # fmt: skip
    return [
        *sft,
        *zenflow,
        one("SuperOffload", "llama, bf16", f"{training}/DeepSpeed-SuperOffload/finetune_zero3.py", *model,
            "--attn_implementation", "sdpa", "--max_length", "64", "--bench_steps", "4", "--warmup_steps", "0",
            stage=3, needs="data", local_rank=True, limit=1e-2,
            sections={**bf16, "train_batch_size": 4, "zero_optimization": {"offload_optimizer": superoffload}}),
        one("offload_states", "fp32", f"{training}/offload_states/offload_states.py",
            "--hidden_dim", "64", "--iteration", "4", "--warmup", "1", "--dtype", "torch.float32",
            stage=3, needs="seed", local_rank=True,
            ends="it asserts that an accelerator's memory becomes free, and a CPU counts none"),
    ]  # fmt: skip
