"""Tracing: one rank's recorder, and traces of all ranks on one time axis with Horovod's timeline.

`recorder` writes. `timeline` is the common form, with its summary, and one step of it for
`tierckpt report`. `traces` reads the files of Tierckpt and of Horovod, and writes merged ones.
"""

from __future__ import annotations
