"""Processes of our own, which find this very package, and the standard library before all else.

A child is `python -c`, which knows the folder of this package and goes on in `begin`. The folder is
not in the environment: what `PYTHONPATH` names comes before the standard library, and the folder of
an installed package has others in it, such as backports of modules that the library has by now.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import site
import sys
from collections.abc import Iterable
from pathlib import Path

_PACKAGE_ROOT = str(Path(__file__).resolve().parents[1])
_NOT_HANDED_ON = frozenset(
    (
        "PYTHONPATH",  # a child is given the module path itself
        "PYTHONWARNINGS",  # those of a child's imports would end it where they are errors
        *("PYTHONINSPECT", "PYTHONSTARTUP"),  # are for who sits at a terminal
    )
)
_BEGINNING = (
    "import json, sys; library = sys.path[:]; root, path, with_site = json.loads(sys.argv[2]); "
    "sys.path.append(root); from tierckpt._children import begin; begin(library, path, with_site)"
)
"""sys.argv: "-c", the module, this, and what the module is given."""


def child_command(module: str, *arguments: str, path: Iterable[str] = ()) -> list[str]:
    """For `subprocess`: this interpreter, to run a module of ours as `python -m` would.

    `path` is where the child finds modules after those of the standard library; without it, where
    this process does. The child's environment is to be `child_environment()`.
    """
    flags = ["-S", "-P", "-X", f"utf8={sys.flags.utf8_mode}"]
    flags += ["-E"] if sys.flags.ignore_environment else []
    flags += ["-s"] if sys.flags.no_user_site else []
    found = list(path) or module_path()
    paths = json.dumps([_PACKAGE_ROOT, found, not sys.flags.no_site])
    return [sys.executable, *flags, "-c", _BEGINNING, module, paths, *arguments]


def child_environment() -> dict[str, str]:
    """For `subprocess`: ours, without what steers another interpreter than this one."""
    return {n: v for n, v in os.environ.items() if n not in _NOT_HANDED_ON}


def begin(library: list[str], path: Iterable[str], with_site: bool) -> None:
    """In the child: become the module that `sys.argv` names. `library` is the path that the
    interpreter itself began with; `with_site`: take up packages' .pth files, as others do."""
    # What is opened first would take the numbers of streams that are closed, and be written to.
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)
    sys.path[:] = library
    if with_site:
        site.main()
    sys.path[:] = [*library, *(entry for entry in path if entry not in library)]
    _, module, _, *arguments = sys.argv
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def module_path() -> list[str]:
    """Where this process finds modules, for one that runs in another folder."""
    found = []
    for entry in sys.path:
        with contextlib.suppress(OSError):  # relative to a folder that was removed
            # What does not exist may be a name that means something to an import hook.
            found.append(os.path.abspath(entry) if os.path.exists(entry or ".") else entry)
    return found


def without_packages_own(path: list[str]) -> list[str]:
    """Without folders inside installed packages, which put them there as they are imported
    (setuptools does): they come with the package, and at another moment in each process."""
    sites = [p for p in path if os.path.basename(p) in ("site-packages", "dist-packages")]
    return [p for p in path if not any(p.startswith(site + os.sep) for site in sites)]


__all__ = ["begin", "child_command", "child_environment", "module_path", "without_packages_own"]
