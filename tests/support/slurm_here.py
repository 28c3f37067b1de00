"""Whether tests can use Slurm here, for skip marks:

    pytestmark = pytest.mark.skipif(bool(slurm_missing()), reason=slurm_missing())

If REQUIRE_SLURM=1 is set, the question fails instead, before the first test is run. The gate does
not set it, and installs no Slurm: these tests run by hand, and wherever Slurm is installed.
"""

from __future__ import annotations

import functools
import os
import shutil

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo")
# Daemons are in folders that users' PATH seldom has.
PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"])


@functools.cache
def slurm_missing() -> str:
    """The reason, starting with "Slurm", why none can be started; empty: one can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if not missing:
        return ""
    reason = f"no Slurm: {', '.join(missing)} not found (Debian: slurmctld slurmd munge)"
    if os.environ.get("REQUIRE_SLURM", "0") not in ("", "0"):
        pytest.fail(f"REQUIRE_SLURM is set, and there is {reason}", pytrace=False)
    return reason
