"""Training: one loop for every task and model."""
