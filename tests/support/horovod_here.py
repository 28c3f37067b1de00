"""Whether tests can use Horovod and MPI here, for skip marks:

    pytestmark = pytest.mark.skipif(bool(horovod_missing()), reason=horovod_missing())

The answer is found once in a test run, in another process, as importing Horovod starts threads.
If REQUIRE_HOROVOD=1 or REQUIRE_MPI=1 is set, as in the gate, the question fails instead: in a skip
mark, before the first test is run.
"""

from __future__ import annotations

import functools
import os
import sys

import pytest

from tierckpt.doctor import Horovod, probe


def horovod_missing() -> str:
    """The reason, starting with "Horovod", why none works here; empty: one works."""
    return _or_fail("Horovod", _found().missing)


def mpi_missing() -> str:
    """The reason, starting with a name, why no Horovod job can run over MPI; empty: it can."""
    return _or_fail("MPI", _found().mpi_missing)


@functools.cache
def _found() -> Horovod:
    return probe()


def _or_fail(name: str, reason: str) -> str:
    if not reason:
        return ""
    variable = f"REQUIRE_{name.upper()}"
    if os.environ.get(variable, "0") not in ("", "0"):
        pytest.fail(
            f"{variable} is set, and there is no {name} for {sys.executable}: {reason}. "
            "make horovod builds Horovod and says what it needs.",
            pytrace=False,
        )
    return f"no {name}: {reason} (make horovod)"
