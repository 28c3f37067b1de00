"""Routed files: the folders in which a program writes files of a version, and what it wrote."""
