"""Modules that the store tier's fork server imports before it forks, outside of the forked
processes' garbage collection."""

import gc

import tierckpt.testing.tiny_job  # noqa: F401

gc.collect()
gc.freeze()
