"""Format: the bytes that FORMAT.md describes. Pure: values and bytes, no input or output."""
