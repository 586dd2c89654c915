"""Where a shard rests while nobody works on it: device memory, host memory or NVMe."""
