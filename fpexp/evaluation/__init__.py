"""Evaluation: accuracies over masks, and the length-generalisation curve."""
