"""The fork server that ranks come from imports this: torch, and all that a rank needs."""

import gc

import tests.chaos.job  # noqa: F401

gc.freeze()  # or each rank would look through all that was imported, and so copy it
