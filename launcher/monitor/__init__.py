"""What a run writes and shows: metrics, pictures, timings, memory, logs of collectives, traces."""
