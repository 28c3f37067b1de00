"""Commands that compute how often to checkpoint, and what failures cost."""
