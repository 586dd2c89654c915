"""Optimizers and schedules: the optimizer step on the slices that a rank owns."""
