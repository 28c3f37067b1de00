"""SIGKILL at the points of a version of files: the version before it is there, bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tierckpt.files import Files

FILES_KILL = "kill@files.seal:version=3"
PROGRAM = """
import sys
from pathlib import Path
from tierckpt.files import Files

with Files(sys.argv[1], shm_dir=sys.argv[2], agent="inline", local_every_steps=1) as files:
    for number in range(1, 5):
        with files.version() as f:
            for name in ("a", "b"):
                Path(f.route(name)).write_bytes(b"%d" % number * 700_000)
"""


def test_the_version_before_is_whole(tmp_path: Path, shm_dir: Path) -> None:
    place = tmp_path / "ckpts", shm_dir
    environment = {"TIERCKPT_FAULTS": FILES_KILL, "TIERCKPT_FAULTS_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, place)], env={**os.environ, **environment}
    )
    assert done.returncode == -signal.SIGKILL
    with Files(place[0], shm_dir=shm_dir, agent="inline") as files:
        found = files.restore()
        assert found is not None
        assert found.number == 2
        assert {n: Path(p).read_bytes() for n, p in found.items()} == dict.fromkeys(
            ("a", "b"), b"2" * 700_000
        )
