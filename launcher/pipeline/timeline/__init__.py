"""Timings of the actions of a schedule: simulated, in closed form, measured, and drawn. No torch."""
