"""Hugging Face models cut into stages: each runs the model's own forward, with stand-ins for the rest."""
