"""Unmodified third-party programs, run on this engine and on DeepSpeed: `make clients`."""
