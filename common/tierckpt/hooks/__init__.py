"""Hooks: they notice the start and end of steps and iterations."""
