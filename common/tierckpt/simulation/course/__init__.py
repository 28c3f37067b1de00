"""One course of a simulated job, from its start to the end of its work or of the wall time.

`job` trains, fails and restarts. `schedule` places versions on the time axis, `holdings` knows the
newest version on each level, `machines` are the nodes and spares, `shared_store` is the file system
of all.
"""
