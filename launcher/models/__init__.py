"""Hugging Face models: construction on the meta device, initialisation, weights, transformer blocks."""
