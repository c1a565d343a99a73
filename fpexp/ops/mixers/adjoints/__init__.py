"""The gradients of the mixers' factors and product, by hand; no op of its own."""
