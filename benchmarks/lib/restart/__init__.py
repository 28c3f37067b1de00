"""The ranks that restart.py starts, and the ways in which they restore."""
