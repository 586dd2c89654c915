"""Tensor parallelism: splits the layers of a model over the ranks of the tp axis, according to a plan."""
