"""Restore: from the versions that exist to the live training state."""
