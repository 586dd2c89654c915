"""A script for transformers' Trainer that knows nothing of launcher: trainer_script.py DS_CONFIG OUTPUT BATCH."""

import json
import sys
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainingArguments, set_seed

set_seed(0)
config = Qwen3MoeConfig(
    **{"vocab_size": 61, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 24},
    **{"num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64},
)
rows = torch.randint(0, 61, (32, 16), generator=torch.Generator().manual_seed(0))
trainer = Trainer(
    model=Qwen3MoeForCausalLM(config),
    args=TrainingArguments(
        output_dir=sys.argv[2],
        deepspeed=None if sys.argv[1] == "none" else sys.argv[1],
        per_device_train_batch_size=int(sys.argv[3]),
        max_steps=4,
        logging_steps=1,
        learning_rate=1e-2,
        adam_epsilon=1e-4,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
    ),
    train_dataset=[{"input_ids": row, "labels": row} for row in rows],
)
trainer.train()
trainer.save_model()
if trainer.is_world_process_zero():
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    Path(sys.argv[2], "losses.json").write_text(json.dumps(losses))
