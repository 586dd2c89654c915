"""Chooses the stage boundaries: the best partition by layer costs, computed from shapes or measured."""
