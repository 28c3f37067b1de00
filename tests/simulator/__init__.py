"""A deterministic simulation of whole jobs: the real product in a world that a seed decides.

Trainers, agents and their threads run in one thread of one process, one after the other, in an
order drawn from the seed. What they take from outside (the clock, threads, locks, processes,
sockets, random numbers) is simulated below the standard library, so the product needs no seam:
its modules are loaded once for each simulated process, with other modules in the place of `time`,
`threading`, `os`, `socket`, ... Files are real ones, in a folder in memory.

The idea is that of FoundationDB's simulation and of TigerBeetle's VOPR.
"""
