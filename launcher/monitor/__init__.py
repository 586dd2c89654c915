"""The output of a run: metrics, plots, timings, memory, logs of collectives, traces."""
