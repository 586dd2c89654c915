"""Times of the actions of a schedule: simulated, by formula, as measured, and in pictures. No torch."""
