"""Train the embedded model with LoRA adapters, and write the median step time: a program for `predicted_steps`.

launch --num_gpus 2 --device cpu benchmarks/adapter_steps.py DS.json RESULT.json
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import launcher
from launcher.models.adapters import LoraSettings, with_adapters
from launcher.models.build import load_config

RANK, SEQUENCE, STEPS, WARMUP_STEPS = 8, 256, 16, 3


def main(config: str, result: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(load_config("default"))
    adapted: Any = with_adapters(model, LoraSettings.of(RANK))
    engine, *_ = launcher.initialize(model=adapted, config=config)
    ids = torch.randint(200, (engine.train_micro_batch_size_per_gpu(), SEQUENCE))
    times = []
    for _ in range(STEPS):
        began = time.perf_counter()
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        times.append(time.perf_counter() - began)
    if int(os.environ["RANK"]) == 0:
        Path(result).write_text(json.dumps(median(times[WARMUP_STEPS:])), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[-2:])  # after --local_rank
