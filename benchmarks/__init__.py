"""The same training job by the launcher and by its peers, side by side: `python -m benchmarks.zero`."""
