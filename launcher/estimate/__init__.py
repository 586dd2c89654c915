"""The needs of a run before it starts: memory by component, by formula and by a rehearsal of the real engine."""
