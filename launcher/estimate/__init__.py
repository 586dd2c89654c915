"""Memory estimates for a run before it starts, from traces or from a dry run of the real engine."""
