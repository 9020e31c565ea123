"""Training on several processes: one leads, the others follow, and the weights are divided."""
