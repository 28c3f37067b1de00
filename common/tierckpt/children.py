"""Processes of our own: started so that they find this very package, wherever they run."""

from __future__ import annotations

import os
from pathlib import Path

_PACKAGE_ROOT = str(Path(__file__).resolve().parents[1])


def child_environment() -> dict[str, str]:
    """For `subprocess`: ours, with the folder that this package lies in first on PYTHONPATH.

    A script may have found it by its own `sys.path`, or by the folder it was started in.
    """
    path = [_PACKAGE_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
