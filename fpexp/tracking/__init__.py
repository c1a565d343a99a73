"""Where a run's numbers go: JSONL always, the console, and wandb when asked."""
