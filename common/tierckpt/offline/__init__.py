"""Offline: checkpoints without the job that made them.

`survey` and `catalog` list what exists, `verify` checks it, `load`, `stored_version` and
`difference` read tensors.
"""
