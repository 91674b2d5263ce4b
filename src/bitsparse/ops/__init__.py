"""Training operations: autograd functions over the backends."""
