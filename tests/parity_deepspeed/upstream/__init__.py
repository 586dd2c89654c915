"""DeepSpeed's own unit tests, from a checkout given by the user, on this engine and on DeepSpeed."""
