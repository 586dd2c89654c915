"""Programs of others on our engine: what imports `deepspeed` gets this package."""
