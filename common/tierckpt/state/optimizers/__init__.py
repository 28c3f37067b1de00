"""Optimizers: the state that optimizers keep beyond torch's `state` and `param_groups`."""
