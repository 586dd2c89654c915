"""Storage of shards while nobody works on them: device memory, host memory or NVMe."""
