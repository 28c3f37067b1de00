"""Optimizers: what optimizers keep beyond torch's `state` and `param_groups`."""
