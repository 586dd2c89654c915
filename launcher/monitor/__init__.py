"""The output of a run: metrics, pictures, timings, memory, logs of collectives, traces."""
