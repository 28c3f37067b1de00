"""State: the live training state as names, values and bytes."""
