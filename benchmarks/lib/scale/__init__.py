"""Helpers of scale.py: simulated jobs, and the simulator beside measured ones."""
