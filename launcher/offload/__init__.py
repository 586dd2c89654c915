"""Storage for shards that are not in use: device memory, host memory or NVMe."""
