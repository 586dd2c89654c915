"""Hugging Face models: from a config on meta, their first values, their weights, their blocks."""
