"""Jobs that are killed and restarted, for goodput.py."""
