"""ZeRO 3 from initialization to export:  launch --num_gpus 2 --device cpu examples/zero3_and_export.py

Inside zero.Init the model is built without memory, and no rank ever holds all of it. The export is an ordinary model.
"""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import launcher
from launcher import zero

OUT = "runs/zero3_and_export"
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
shape = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
)
torch.manual_seed(0)
rows = [{"input_ids": row, "labels": row} for row in torch.randint(256, (64, 32))]

with zero.Init():
    model = AutoModelForCausalLM.from_config(shape)
engine, _, loader, _ = launcher.initialize(model=model, config=CONFIG, training_data=rows, seed=1)
for batch in loader:
    loss = engine(**{name: value.to(engine.device) for name, value in batch.items()}).loss
    engine.backward(loss)
    engine.step()

with zero.GatheredParameters([model.lm_head.weight]):  # all ranks must enter it
    largest = model.lm_head.weight.abs().max().item()
engine.save_16bit_model(OUT)  # all ranks must call it

if engine.global_rank == 0:
    print(f"loss {loss.item():.3f}  largest weight of the head {largest:.3f}")
    exported = AutoModelForCausalLM.from_pretrained(OUT)
    print("generated", exported.generate(rows[0]["input_ids"][None, :4], max_new_tokens=8)[0].tolist())
