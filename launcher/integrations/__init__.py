"""Runs third-party programs on this engine: `import deepspeed` resolves to this package."""
