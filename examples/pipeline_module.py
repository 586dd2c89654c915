"""Pipeline stages for your own model:  launch --num_gpus 2 --device cpu examples/pipeline_module.py

Each rank builds only its own layers. The microbatches of a step pass through the stages one after another.
"""

import torch
from torch import nn

import launcher
from launcher.pipe import LayerSpec, PipelineModule

STEPS = 20
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 4,  # microbatches per step
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "pipeline": {"schedule": "1f1b"},
}

torch.manual_seed(0)
inputs = torch.randn(512, 8)
data = list(zip(inputs, inputs.sum(dim=1, keepdim=True), strict=True))  # (inputs, labels)
model = PipelineModule(
    layers=[
        LayerSpec(nn.Linear, 8, 32),
        nn.Tanh(),
        LayerSpec(nn.Linear, 32, 32),
        nn.Tanh(),
        LayerSpec(nn.Linear, 32, 1),
    ],
    num_stages=2,
    loss_fn=nn.functional.mse_loss,
)
engine, *_ = launcher.initialize(model=model, config=CONFIG, training_data=data)
for step in range(STEPS):
    loss = engine.train_batch()  # forward, backward and step of all microbatches
    if engine.global_rank == 0 and step % 5 == 4:
        print(f"step {step + 1}  loss {loss.item():.4f}")
