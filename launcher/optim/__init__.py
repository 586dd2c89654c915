"""Optimizers and schedules: the step on what a rank owns."""
