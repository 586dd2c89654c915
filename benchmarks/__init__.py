"""Benchmarks that run the same training job with the launcher and with its peers: `python -m benchmarks.zero`."""
