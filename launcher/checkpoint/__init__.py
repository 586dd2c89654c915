"""Saving and loading of logical tensors: any topology writes a checkpoint, any topology reads it."""
