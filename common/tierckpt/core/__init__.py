"""Core: the decisions that all ranks must make alike. Pure: no input or output."""
