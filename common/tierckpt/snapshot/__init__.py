"""Snapshot: one version, copied into a slot while training continues."""
