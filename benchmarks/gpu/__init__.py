"""The checks on a GPU: `python -m benchmarks.gpu` (`make gpu`)."""
