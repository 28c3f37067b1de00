"""Files of any program through the levels: memory, local, peers and persistent.

A program under MPI, or a single process, needs no torch for that::

    from mpi4py import MPI
    from tierckpt.files import Files

    with Files("ckpts", group=MPI.COMM_WORLD) as files:
        restored = files.restore()
        start = 0 if restored is None else load(restored["state.bin"])
        for step in range(start, steps):
            ...
            if files.need_checkpoint():
                with files.version() as f:
                    save(f.route("state.bin"))

The idea of `route` is that of SCR (Moody et al., "Design, Modeling, and Evaluation of a Scalable
Multi-level Checkpointing System", SC 2010); `tierckpt.scr` has the names of SCR's Python module.
Nothing in this package imports torch.
"""

from __future__ import annotations

from tierckpt.storage.routed import VersionFiles

from .files import Files
from .versions import RestoredFiles

__all__ = ["Files", "RestoredFiles", "VersionFiles"]
