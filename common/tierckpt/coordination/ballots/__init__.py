"""Ballots: how the votes of all ranks at a boundary become one result."""
