"""Commands that run a training script."""
