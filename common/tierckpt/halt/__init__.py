"""Halt: signals, requests and the end of an allocation."""
