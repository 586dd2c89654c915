"""Where to cut: the best cut by the costs of layers, and how such costs are counted and timed, whatever the model."""
