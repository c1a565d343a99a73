"""Vectors for the kernels of the CPU backends; no op of its own."""
