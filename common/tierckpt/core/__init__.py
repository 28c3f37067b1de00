"""Core: every decision that all ranks must make alike. Pure: no input or output."""
