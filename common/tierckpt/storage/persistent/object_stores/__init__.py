"""Backends for object stores, and the errors of their clients."""

SCHEMES = frozenset({"s3", "s3a", "gs", "gcs", "az", "azure", "abfs", "abfss", "adl"})
"""URLs of the stores that `obstore_backend` serves."""
