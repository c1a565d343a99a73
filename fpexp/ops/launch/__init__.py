"""What Triton backends share: a kernel with its arguments, which can be run here or compiled for a GPU elsewhere."""
