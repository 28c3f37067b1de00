"""Commands that read and write the checkpoints of other tools."""
