"""A training loop:  launch --num_gpus 2 --device cpu examples/plain_loop.py

Any nn.Module works. The engine shards the optimizer state (ZeRO 1) and distributes the data over the ranks.
"""

import torch
from torch import nn

import launcher

CONFIG = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}},
    "zero_optimization": {"stage": 1},
}

torch.manual_seed(0)
inputs = torch.randn(256, 8)
data = list(zip(inputs, inputs.sum(dim=1, keepdim=True), strict=True))
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

engine, optimizer, loader, _ = launcher.initialize(model=model, config=CONFIG, training_data=data)
for epoch in range(5):
    for features, wanted in loader:  # microbatches of this rank
        loss = nn.functional.mse_loss(engine(features.to(engine.device)), wanted.to(engine.device))
        engine.backward(loss)
        engine.step()  # an optimizer step at the accumulation boundary
    if engine.global_rank == 0:
        print(f"epoch {epoch}  loss {loss.item():.4f}  gradient norm {engine.get_global_grad_norm():.3f}")
