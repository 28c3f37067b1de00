"""Helpers of manyranks.py."""
