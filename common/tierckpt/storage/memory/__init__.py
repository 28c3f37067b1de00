"""Memory: shared memory that outlives a process, as slots."""
