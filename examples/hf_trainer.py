"""The Hugging Face Trainer on this engine:  launch --num_gpus 2 --device cpu examples/hf_trainer.py

The script does not depend on `launch`. The Trainer passes the JSON on and fills in every "auto".
"""

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

CONFIG = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 2},
}

args = TrainingArguments(
    "runs/hf_trainer",
    max_steps=10,
    per_device_train_batch_size=4,
    learning_rate=1e-3,
    logging_steps=5,
    report_to="none",
    deepspeed=CONFIG,
)
torch.manual_seed(0)
rows = [{"input_ids": row, "labels": row} for row in torch.randint(64, (64, 32)).tolist()]
shape = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
)
trainer = Trainer(LlamaForCausalLM(shape), args, train_dataset=Dataset.from_list(rows))
trainer.train()
trainer.save_model()
