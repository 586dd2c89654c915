"""Scripts as users of PEFT and TRL write them. `launch` starts it once for many scenarios, as `hf_scenarios.py`.

trl_scenarios.py DIRECTORY NAME [NAME ...]      (writes DIRECTORY/results.json on rank 0)
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from tests.integrations.hf_scenarios import (
    SCENARIOS,
    TINY,
    VOCABULARY,
    json_of,
    main,
    plainly,
    told,
    trainer_of,
)

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
SPECIAL = ["<pad>", "<eos>", "<unk>"]
WORDS = [f"w{i}" for i in range(VOCABULARY - len(SPECIAL))]


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word."""
    made = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate([*SPECIAL, *WORDS])}, unk_token="<unk>")
    )
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    pad, eos, unk = SPECIAL
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token=pad, eos_token=eos, unk_token=unk)


def texts(number: int, seed: int) -> list[str]:
    """Of 4 to 11 words."""
    g = torch.Generator().manual_seed(seed)
    return [
        " ".join(WORDS[i] for i in torch.randint(len(WORDS), (4 + n % 8,), generator=g))
        for n in range(number)
    ]


def arguments(directory: Path, stage: int | None) -> dict[str, Any]:
    """Of four rows a step, on one process or several. Without a stage: plainly."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    given = {
        "output_dir": str(directory), "per_device_train_batch_size": 4 // world, "num_train_epochs": 1,
        "logging_steps": 1, "save_strategy": "no", "report_to": [], "learning_rate": 1e-2, "disable_tqdm": True,
        "bf16": False, "max_length": 32, "gradient_checkpointing": False, "use_cpu": True,
    }  # fmt: skip
    return given if stage is None else {**given, "deepspeed": json_of(stage)}


def lora(directory: Path, stage: int | None) -> Any:
    """A LoRA under the Trainer; its adapter, saved and read."""

    def model() -> Any:
        return get_peft_model(LlamaForCausalLM(LlamaConfig(**TINY)), LoraConfig(**LORA))

    config = None if stage is None else json_of(stage)
    trainer = trainer_of(directory, config, model=model, use_cpu=True)
    trainer.train()
    trainer.save_model(str(directory / "adapter"))
    trainer.accelerator.wait_for_everyone()

    def read() -> dict[str, float]:
        transformers.set_seed(1)
        found = PeftModel.from_pretrained(LlamaForCausalLM(LlamaConfig(**TINY)), directory / "adapter")
        return {name: float(p.norm()) for name, p in found.named_parameters() if "lora_" in name}

    return {**told(trainer), "adapter": plainly(read)}


def sft(directory: Path, stage: int | None) -> Any:
    args = SFTConfig(**arguments(directory, stage))
    transformers.set_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**TINY))
    data = Dataset.from_dict({"text": texts(16, 0)})
    trainer = SFTTrainer(model=model, args=args, train_dataset=data, processing_class=tokenizer())
    trainer.train()
    return told(trainer)


def dpo(directory: Path, stage: int | None) -> Any:
    """With a reference model, which is sharded as well at stage 3."""
    args = DPOConfig(**arguments(directory, stage))
    transformers.set_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**TINY))
    transformers.set_seed(1)
    reference = LlamaForCausalLM(LlamaConfig(**TINY))
    data = Dataset.from_dict(
        {key: texts(12, seed) for seed, key in enumerate(("prompt", "chosen", "rejected"))}
    )
    trainer = DPOTrainer(
        model=model, ref_model=reference, args=args, train_dataset=data, processing_class=tokenizer()
    )
    trainer.train()
    margins = [entry["rewards/margins"] for entry in trainer.state.log_history if "rewards/margins" in entry]
    return {**told(trainer), "margins": margins}


KINDS: dict[str, Callable[[Path, int | None], Any]] = {"lora": lora, "sft": sft, "dpo": dpo}
for _name, _run in KINDS.items():
    SCENARIOS[f"{_name} plain"] = partial(_run, stage=None)
    for _stage in (2, 3):
        SCENARIOS[f"{_name} {_stage}"] = partial(_run, stage=_stage)

if __name__ == "__main__":
    main()
