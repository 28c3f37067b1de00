"""Search for false alarms of the replica check. Two ranks of DDP over gloo train the whole matrix
of models, optimizers and loops, some hundred boundaries each, until the given number of boundaries
was passed: 86,400 are a day at one step a second.

    python -m tests.alarms --boundaries 86400

Each reported drift is compared with the truth, all bits of all ranks. Ranks of a script that really
drift apart are reported separately, and are a mistake of this program. The exit status is 1 after
either.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile

import torch

from tests.alarms.ranks import RANKS, rank_main


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.alarms", description=__doc__)
    parser.add_argument("--boundaries", type=int, default=86_400)
    parser.add_argument("--only", default="", help="jobs with this in their names")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder = tempfile.mkdtemp(prefix="tierckpt-alarms-", dir="/dev/shm")
    try:
        args = (folder, options.boundaries, options.only)
        torch.multiprocessing.spawn(rank_main, args, nprocs=RANKS)
    except torch.multiprocessing.ProcessExitedException as ended:
        return ended.exit_code
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
