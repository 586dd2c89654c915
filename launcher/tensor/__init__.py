"""Tensor parallelism: layers of a model split over the ranks of the tp axis, as a plan says."""
