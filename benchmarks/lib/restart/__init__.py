"""The runs of restart.py, their ranks, and the ways to restart."""
