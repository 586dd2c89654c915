"""What the core of ZeRO does not need: each module is one feature, and hooked in only where it is on."""
