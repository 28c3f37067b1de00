"""Memory: slots in shared memory that outlives a process."""
