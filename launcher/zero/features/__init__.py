"""Optional features of ZeRO: one module each, attached to the core only if enabled."""
