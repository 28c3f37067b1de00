"""Replicas: whether the state that all ranks share is equal on all ranks."""
