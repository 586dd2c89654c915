"""Resume a checkpoint on another number of ranks. Run the script twice:

launch --num_gpus 2 --device cpu examples/resume_elsewhere.py
launch --num_gpus 1 --device cpu examples/resume_elsewhere.py

Two ranks save at ZeRO 3; one rank resumes at ZeRO 1. The global batch stays the same.
"""

import torch
from torch import nn

import launcher
from launcher.comm import init_distributed

OUT = "runs/resume_elsewhere"

init_distributed()
CONFIG = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {
        "stage": 3 if torch.distributed.get_world_size() > 1 else 1,
        "stage3_param_persistence_threshold": 0,
    },
}
torch.manual_seed(0)
inputs = torch.randn(64, 8)
data = list(zip(inputs, inputs.sum(dim=1, keepdim=True), strict=True))
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

engine, _, loader, _ = launcher.initialize(model=model, config=CONFIG, training_data=data)
found, state = engine.load_checkpoint(OUT)  # (None, {}) if there is no checkpoint
if engine.global_rank == 0:
    print(f"going on after step {state['steps']}" if found else "starting anew")
for features, wanted in loader:
    loss = nn.functional.mse_loss(engine(features.to(engine.device)), wanted.to(engine.device))
    engine.backward(loss)
    engine.step()
engine.save_checkpoint(OUT, client_state={"steps": engine.global_steps})
if engine.global_rank == 0:
    print(f"step {engine.global_steps}  loss {loss.item():.4f}")
