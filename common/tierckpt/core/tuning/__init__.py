"""Tuning: what a version costs, and how often one is worth it. Pure."""
