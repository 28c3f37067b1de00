"""Coordination: what ranks tell one another to decide alike."""
