"""Commands that a job, or its next start, obeys."""
