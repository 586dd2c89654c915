"""Programs from other checkouts: accelerate's examples, LLaMA-Factory, and the tests of accelerate and transformers."""

from __future__ import annotations

from typing import Any

from tests.clients.client import AUTO, Client


def accelerates() -> list[Client]:
    """Return accelerate's examples, with the environment variables that `accelerate launch` would set."""
    home = "accelerate"
    variables = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": "{json}",
        "ACCELERATE_MIXED_PRECISION": "no",
    }
    model = ("--model_name_or_path", "{models}/llama-untied", "--tokenizer_name", "{models}/llama-untied")
    text = (
        *model,
        "--dataset_name",
        "wikitext",
        "--block_size",
        "32",
        "--seed",
        "1",
        "--output_dir",
        "{out}",
    )
    steps = ("--per_device_train_batch_size", "4", "--max_train_steps", "6", "--num_warmup_steps", "2")
    adamw = {"optimizer": {"type": "AdamW", "params": {"lr": AUTO, "weight_decay": AUTO}}}
    warmup = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": AUTO, "total_num_steps": AUTO}}
    rows: list[tuple[str, str, tuple[str, ...], int, dict[str, Any]]] = [
        ("nlp_example", "BERT", (), 2, {}),
        ("nlp_example", "BERT", (), 3, {}),
        ("complete_nlp_example", "BERT, a checkpoint an epoch",
         ("--checkpointing_steps", "epoch", "--output_dir", "{out}"), 3, {}),
        ("by_feature/checkpointing", "BERT", ("--checkpointing_steps", "2", "--output_dir", "{out}"), 2, {}),
        ("by_feature/gradient_accumulation", "BERT, 2 microbatches",
         ("--gradient_accumulation_steps", "2"), 3, {"gradient_accumulation_steps": 2}),
        # with two, the program steps inside no_sync(): an error on both engines
        ("by_feature/gradient_accumulation_for_autoregressive_models", "llama, 1 microbatch", (), 2, {}),
        ("by_feature/cross_validation", "BERT, 2 folds", ("--num_folds", "2"), 2, {}),
        ("by_feature/early_stopping", "BERT", (), 3, {}),
        ("by_feature/memory", "BERT", (), 2, {}),
        ("by_feature/multi_process_metrics", "BERT", (), 3, {}),
        ("by_feature/tracking", "BERT", ("--project_dir", "{out}"), 2, {}),
        ("by_feature/automatic_gradient_accumulation", "BERT", (), 2, {}),
        ("by_feature/profiler", "BERT", (), 3, {}),
        ("cv_example", "ResNet, its body frozen", ("--data_dir", "{models}/pictures"), 2, {}),
        ("complete_cv_example", "ResNet, its body frozen, a checkpoint an epoch",
         ("--data_dir", "{models}/pictures", "--checkpointing_steps", "epoch", "--output_dir", "{out}"), 3, {}),
        ("by_feature/deepspeed_with_config_support", "llama", (*text, *steps), 2, {}),
        ("by_feature/deepspeed_with_config_support", "llama, optimizer and scheduler of the JSON",
         (*text, *steps, "--checkpointing_steps", "epoch", "--load_best_model"), 3, adamw | {"scheduler": warmup}),
    ]  # fmt: skip
    return [
        Client(f"accelerate {name.rpartition('/')[2]}", setting, home, f"{home}/examples/{name}.py", arguments, stage,
               sections=sections, environment=variables, stand_ins="data metrics gloo timm",
               alone="it drops an empty param group, which the scheduler counts" if "with_config" in name else "")
        for name, setting, arguments, stage, sections in rows
    ]  # fmt: skip


def factory() -> list[Client]:
    """Return the runs of LLaMA-Factory's command line, with the package versions that it requires."""
    home = "LLaMA-Factory"
    flags = {
        "model_name_or_path": "{models}/llama-untied", "stage": "sft", "do_train": "true", "dataset": "identity",
        "dataset_dir": "{examples}/LLaMA-Factory/data", "template": "default", "cutoff_len": "32", "max_samples": "24",
        "output_dir": "{out}", "per_device_train_batch_size": "2", "max_steps": "4", "report_to": "none",
        "deepspeed": "{json}", "learning_rate": "1e-3", "logging_steps": "1", "save_strategy": "no",
    }  # fmt: skip
    made = []
    for stage, kind in ((2, "full"), (3, "full"), (3, "lora")):
        arguments = [word for name, value in flags.items() for word in (f"--{name}", value)]
        made.append(
            Client("LLaMA-Factory SFT", f"llama, untied, {kind}", home, f"{home}/src/train.py",
                   (*arguments, "--finetuning_type", kind), stage, stand_ins="torchaudio gloo",
                   paths=("{older}", "{examples}/LLaMA-Factory/src"), environment={"PYTHONDONTWRITEBYTECODE": "1"})
        )  # fmt: skip
    return made


def suites() -> list[Client]:
    """Return test suites of other projects that need one process, run as if there were accelerators with fp16."""
    deepspeed = ("test_deepspeed", "test_deepspeed_gradient_accumulation", "test_deepspeed_multiple_model")
    return [
        Client("accelerate's tests", "tests/deepspeed", "accelerate",
               tests=tuple(f"tests/deepspeed/{name}.py" for name in deepspeed), paths=("{cwd}/src",), limit_s=2400,
               stand_ins="data metrics accelerators gloo fp16"),
        Client("transformers' tests", "test_trainer_distributed_deepspeed.py", "transformers",
               tests=("tests/trainer/distributed/test_trainer_distributed_deepspeed.py",),
               limit_s=2400, least=0.95, stand_ins="data torch_accelerators gloo fp16"),
    ]  # fmt: skip
