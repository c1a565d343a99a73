"""What runs on the GPU; no op of its own."""
