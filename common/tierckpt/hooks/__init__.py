"""Hooks: where steps and backward passes begin and end."""
