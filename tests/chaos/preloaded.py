"""Imports for the fork server of the ranks: torch, and all modules that a rank needs."""

import gc

import tests.chaos.job  # noqa: F401

gc.freeze()  # otherwise each rank's collector would visit, and so copy, all imported objects
