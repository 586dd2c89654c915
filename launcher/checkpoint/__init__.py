"""Saves and loads logical tensors: a checkpoint written on any topology can be loaded on any other."""
