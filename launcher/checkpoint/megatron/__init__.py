"""Checkpoints of Megatron-Core (`torch_dist`), in and out, under the names of a Hugging Face model."""
