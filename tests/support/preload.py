"""The modules that the fork server of the store tier imports before it forks, left alone by the
garbage collector of what it forks."""

import gc

import tierckpt.testing.tiny_job  # noqa: F401

gc.collect()
gc.freeze()
