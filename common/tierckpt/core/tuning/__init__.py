"""Tuning: the cost of a version, and how often one is worth it. Pure."""
