"""Train with Hugging Face's Trainer on this engine:  launch --config ds_config.json --num_gpus 2 hf_trainer

The script does not depend on `launch`. The text is Python's own documentation as bytes, and the model is a small Llama.
"""

from pydoc_data.topics import topics

from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

LENGTH = 128
text = "\n".join(topics.values()).encode()
rows = [{"input_ids": (row := list(text[i : i + LENGTH])), "labels": row} for i in range(0, 100_000, LENGTH)]
args = TrainingArguments(
    "runs/hf_trainer", max_steps=30, per_device_train_batch_size=4, learning_rate=1e-3, logging_steps=5
)
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=344, num_hidden_layers=4,
                                     num_attention_heads=4, max_position_embeddings=LENGTH))  # fmt: skip
trainer = Trainer(model, args, train_dataset=Dataset.from_list(rows))
trainer.train()
trainer.save_model()
