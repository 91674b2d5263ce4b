"""Predicting the memory of a training step: what ``bitsparse plan`` shows."""
