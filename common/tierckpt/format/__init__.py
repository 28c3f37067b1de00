"""Format: what FORMAT.md describes, and nothing else. Pure: values and bytes, no input or
output."""
