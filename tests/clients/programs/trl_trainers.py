"""TRL's trainers as their documentation shows them: a model by its name, a data set, a DeepSpeed JSON."""

import argparse
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoTokenizer
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

ROWS = 12


def texts(seed: int) -> list[str]:
    """Of 4 to 11 words."""
    g = torch.Generator().manual_seed(seed)
    return [" ".join(f"w{i}" for i in torch.randint(120, (4 + n % 8,), generator=g)) for n in range(ROWS)]


def columns(*names: str) -> dict[str, list[str]]:
    return {name: texts(seed) for seed, name in enumerate(names)}


def longer(completions: list[str], **others: object) -> list[float]:
    """A reward that is known without a model: even words."""
    return [sum(word[-1] in "02468" for word in text.split()) / 8 for text in completions]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trainer", choices=["sft", "dpo", "reward", "kto", "grpo"])
    parser.add_argument("--model")
    parser.add_argument("--deepspeed")
    parser.add_argument("--output_dir")
    parser.add_argument("--lora", action="store_true")
    args = parser.parse_args()
    given = {
        "output_dir": args.output_dir, "deepspeed": args.deepspeed, "per_device_train_batch_size": 2,
        "num_train_epochs": 1, "logging_steps": 1, "save_strategy": "no", "report_to": [], "learning_rate": 1e-3,
        "bf16": False, "gradient_checkpointing": False, "use_cpu": True,
    }  # fmt: skip
    peft = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=True) if args.lora else None
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    common = {"model": args.model, "processing_class": tokenizer, "peft_config": peft}
    if args.trainer == "sft":
        data = Dataset.from_dict({"text": texts(0)})
        trainer = SFTTrainer(args=SFTConfig(**given, max_length=64), train_dataset=data, **common)
    elif args.trainer == "dpo":
        data = Dataset.from_dict(columns("prompt", "chosen", "rejected"))
        trainer = DPOTrainer(args=DPOConfig(**given, max_length=64), train_dataset=data, **common)
    elif args.trainer == "reward":
        data = Dataset.from_dict(columns("chosen", "rejected"))
        trainer = RewardTrainer(args=RewardConfig(**given, max_length=64), train_dataset=data, **common)
    elif args.trainer == "kto":
        data = Dataset.from_dict(
            {**columns("prompt", "completion"), "label": [n % 2 == 0 for n in range(ROWS)]}
        )
        trainer = KTOTrainer(args=KTOConfig(**given, max_length=64), train_dataset=data, **common)
    else:
        data = Dataset.from_dict(columns("prompt"))
        config = GRPOConfig(**given, num_generations=2, max_completion_length=8, beta=0.04)
        trainer = GRPOTrainer(args=config, reward_funcs=longer, train_dataset=data, **common)
    trainer.train()
    trainer.save_model(args.output_dir)
    trainer.accelerator.wait_for_everyone()
    if trainer.accelerator.is_main_process:
        (file,) = Path(args.output_dir).glob("*.safetensors")
        assert all(bool(tensor.isfinite().all()) and tensor.numel() for tensor in load_file(file).values())


if __name__ == "__main__":
    main()
