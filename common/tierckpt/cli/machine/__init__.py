"""Commands that examine a machine."""
