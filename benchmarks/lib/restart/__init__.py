"""The ranks that restart.py starts, and the ways to restart."""
