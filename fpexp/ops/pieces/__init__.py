"""Time in pieces that run side by side: how many, and what carries the state from one to the next."""
