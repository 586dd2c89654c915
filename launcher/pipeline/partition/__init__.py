"""The choice of a cut: the best one by the costs of layers, and how such costs are counted and timed."""
