"""Runs the stages of a rank: the lists of actions, and what crosses between ranks meanwhile."""
