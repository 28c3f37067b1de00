"""Tracing: one rank's recorder, and traces of all ranks on one time axis with Horovod's timeline.

`recorder` writes. `spans` is the common form. `chrome_trace` reads and writes files.
`tierckpt_traces` and `horovod_timeline` interpret them; the latter also measures how well the
clocks agree. `summary` computes, and `step` selects one step for
`tierckpt report`.
"""
