"""Optimizers: optimizers inside others, and the state that they keep besides tensors by name."""
