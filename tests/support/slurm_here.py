"""Whether tests can use Slurm here, for skip marks:

    pytestmark = pytest.mark.skipif(bool(slurm_missing()), reason=slurm_missing())

Where REQUIRE_SLURM=1 is set, asking fails instead: before the first test is run. The gate does not
set it, and installs no Slurm: its tests run by hand, and wherever Slurm is.
"""

from __future__ import annotations

import functools
import os
import shutil

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo")
# Daemons are where users' PATH seldom leads.
PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"])


@functools.cache
def slurm_missing() -> str:
    """Why there is no Slurm to be started, beginning with its name; empty: there is one."""
    former_nodes = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if not former_nodes:
        return ""
    reason = f"no Slurm: {', '.join(former_nodes)} not found (Debian: slurmctld slurmd munge)"
    if os.environ.get("REQUIRE_SLURM", "0") not in ("", "0"):
        pytest.fail(f"REQUIRE_SLURM is set, and there is {reason}", pytrace=False)
    return reason
