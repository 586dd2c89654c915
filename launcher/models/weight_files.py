"""Names of files of weights, as Hugging Face writes them."""

from __future__ import annotations

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
