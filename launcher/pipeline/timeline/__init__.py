"""When the actions of a schedule run: simulated, by formula, as measured, and in pictures. No torch."""
