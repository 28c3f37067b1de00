"""Timeline: every rank's traces and Horovod's timeline on one time axis.

`spans` is what all of it is about. `chrome_trace` reads and writes files, `ours` and `horovod`
know what
is in them, and `horovod` also how far the clocks agree. `intervals` and `summary` compute, `plot`
draws, `command` is `tierckpt trace`.

The recording side is `tierckpt.tracing.recorder`.
"""
