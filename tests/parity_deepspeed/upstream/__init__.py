"""DeepSpeed's own unit tests, from a checkout that the user names, on this engine and on DeepSpeed itself."""
