"""Processes that stand for nodes, and their figures, for levels.py."""
