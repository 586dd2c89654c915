"""`DEVICE`: where tests train and where the truth is computed. `pytest --device cuda` makes it a GPU."""

from __future__ import annotations

import os

import torch

from tests.pool.worker import DEVICE_VARIABLE

ON_GPU = os.environ.get(DEVICE_VARIABLE) == "cuda"
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
"""Every rank of the pool sees one GPU, which is its first; where there are fewer GPUs than ranks, several share it."""
