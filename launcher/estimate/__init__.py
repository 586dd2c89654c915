"""What a run needs, known before it starts: memory by component, by formula and by a rehearsal of the real engine."""
