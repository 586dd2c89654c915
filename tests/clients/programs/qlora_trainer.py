"""The Trainer with QLoRA: bitsandbytes' 4-bit weights, PEFT's adapters; the adapter is saved at the end."""

import argparse

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments, set_seed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--deepspeed")
    parser.add_argument("--out")
    parser.add_argument("--storage", default="uint8")
    args = parser.parse_args()
    set_seed(1)
    given = TrainingArguments(
        args.out, deepspeed=args.deepspeed, per_device_train_batch_size=2, max_steps=8, logging_steps=1, save_steps=4,
        report_to=[], learning_rate=1e-2, use_cpu=True, gradient_checkpointing=True,
    )  # fmt: skip
    packed = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_quant_storage=getattr(torch, args.storage),
    )
    model = AutoModelForCausalLM.from_pretrained(args.model, quantization_config=packed, dtype=torch.float32)
    model = prepare_model_for_kbit_training(model)
    set_seed(2)
    adapter = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    model = get_peft_model(model, adapter)
    g = torch.Generator().manual_seed(0)
    rows = torch.randint(4, 128, (32, 16), generator=g).tolist()
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(model, given, train_dataset=data, data_collator=_stack)
    trainer.train()
    trainer.save_model()


def _stack(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    return {key: torch.tensor([row[key] for row in rows]) for key in rows[0]}


if __name__ == "__main__":
    main()
