"""The run, the options and the results file of stall.py."""
