"""Features that the core of ZeRO does not need: each module is one, and hooked in only where it is on."""
