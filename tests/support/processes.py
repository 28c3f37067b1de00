"""Other processes, which print a line when they reach the point that the test waits for."""

from __future__ import annotations

import subprocess
import sys

from tests.support.warm_python.servers import PYTHON


def python(
    program: str, *arguments: object, own_group: bool = False, warm: bool = False
) -> subprocess.Popen[str]:
    """Start `program`, which ends at the end of its standard input, or earlier.

    `own_group`: it leads a process group, to which a test can send signals. `warm`: it has already
    imported torch, if the fixture `warm_python` is used.
    """
    command = [PYTHON if warm else sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0 if own_group else None,
    )


def end(process: subprocess.Popen[str]) -> None:
    """Close its pipes and wait for it."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    process.stdout.close()
    process.wait(60)
