"""Figures of the pages: each comes from a results file, or is listed as one that does not."""
