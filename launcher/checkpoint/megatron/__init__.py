"""Imports and exports Megatron-Core checkpoints (`torch_dist`), under the names of a Hugging Face model."""
