"""Tracing: the recorder of a rank, and traces of all ranks on one time axis with Horovod's
timeline.

`recorder` writes. `spans` is the common form, `chrome_trace` reads and writes files,
`tierckpt_traces` and `horovod_timeline` know their contents; the latter also measures how far the
clocks agree. `summary` computes, `plot` draws.
"""
