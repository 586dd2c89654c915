"""Runs the stages of a rank: its list of actions, and the transfers between ranks."""
