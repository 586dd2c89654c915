"""Programs that others wrote, unchanged on this engine and on DeepSpeed: `make clients`."""
