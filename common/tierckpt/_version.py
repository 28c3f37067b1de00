"""The one place that holds the version (setup.cfg reads it without importing torch)."""

__version__ = "0.1.0"
