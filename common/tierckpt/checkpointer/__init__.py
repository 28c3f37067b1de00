"""Checkpointer: orchestration of all the other parts."""
