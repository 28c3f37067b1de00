"""The chaos test by hand: `make chaos CHAOS_SECONDS=600 CHAOS_SEED=7`.

It runs rounds with the seeds CHAOS_SEED, CHAOS_SEED + 1, and so on until the time is over, and
finishes the last one. `--rounds 1` with the seed of a finding repeats that round.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.driver import Run
from tests.chaos.job import LAUNCHERS


def main() -> int:
    """Returns the exit status: 1 after a finding."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--launcher", choices=[*LAUNCHERS], default="ddp")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--rounds", type=int, default=0, help="so many at most; 0: no limit")
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--folder", type=Path, help="for log and leftovers; must be empty")
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="tierckpt-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    shm = Path(tempfile.mkdtemp(prefix="tierckpt-chaos-", dir="/dev/shm"))
    deadline = time.monotonic() + args.seconds
    seed, findings = args.seed, []
    try:
        run = Run(args.launcher, folder, shm, lambda text: print(text, flush=True))
        while not seed - args.seed or time.monotonic() < deadline:
            findings += run.round(seed)
            seed += 1
            if seed - args.seed == args.rounds:
                break
    finally:
        shutil.rmtree(shm, ignore_errors=True)
    print(f"{seed - args.seed} rounds, {len(findings)} findings; log: {folder / 'log.jsonl'}")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
