"""Offline: checkpoints without the job that made them.

`survey` and `catalog` list what exists, `verify` checks it, `stored_version` and `comparison` read
tensors.
"""
