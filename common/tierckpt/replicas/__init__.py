"""Replicas: the check that the state shared by all ranks is equal on all of them."""
