"""Child processes that import this very package, with the standard library before everything else.

A child is `python -c` with the folder of this package; it continues in `enter`. The folder is not
in the environment: entries of `PYTHONPATH` come before the standard library, and the folder of an
installed package contains others, such as backports of modules that the library has itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import site
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

_PACKAGE_ROOT = str(Path(__file__).resolve().parents[1])
_NOT_HANDED_ON = frozenset(
    (
        "PYTHONPATH",  # a child gets the module path as an argument
        "PYTHONWARNINGS",  # warnings from a child's imports would end it if they are errors
        *("PYTHONINSPECT", "PYTHONSTARTUP"),  # are for a terminal
    )
)
PR_SET_PDEATHSIG = 1
_ENTRY = (
    "import json, sys; library = sys.path[:]; root, path, with_site = json.loads(sys.argv[2]); "
    "sys.path.append(root); from tierckpt._children import enter; enter(library, path, with_site)"
)
"""The code of `-c`. sys.argv: "-c", the module, the paths, and the module's arguments."""


def child_command(module: str, *arguments: str, path: Iterable[str] = ()) -> list[str]:
    """A command for `subprocess`: this interpreter runs a module of this package as `python -m`
    would.

    The child searches `path` for modules after the standard library; the default is this process's
    path. Start the child with `child_environment()`.
    """
    flags = ["-S", "-P", "-X", f"utf8={sys.flags.utf8_mode}"]
    flags += ["-E"] if sys.flags.ignore_environment else []
    flags += ["-s"] if sys.flags.no_user_site else []
    found = list(path) or module_path()
    paths = json.dumps([_PACKAGE_ROOT, found, not sys.flags.no_site])
    return [sys.executable, *flags, "-c", _ENTRY, module, paths, *arguments]


def package_root_of(command: Sequence[str]) -> str:
    """The folder that contains the package `tierckpt` of a child, from its command line. Raises
    ValueError if it is not a command of `child_command`."""
    root, _, _ = json.loads(next(iter(command[command.index("-c") + 3 :]), ""))
    return str(root)


def child_environment() -> dict[str, str]:
    """An environment for `subprocess`: this one without variables that would affect the child's
    start."""
    return {n: v for n, v in os.environ.items() if n not in _NOT_HANDED_ON}


def enter(library: list[str], path: Iterable[str], with_site: bool) -> None:
    """In the child: run the module named in `sys.argv`. `library` is the interpreter's own initial
    path; `with_site`: process packages' .pth files, as usual."""
    # Fill the numbers of closed standard streams: a file opened there would be written to.
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


def end_with_parent() -> None:
    """In the child: the kernel kills it when the thread ends that started it."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def module_path() -> list[str]:
    """This process's module path, for a process in another folder."""
    found = []
    for entry in sys.path:
        with contextlib.suppress(OSError):  # a path relative to a removed folder
            # An entry that does not exist may be meant for an import hook.
            found.append(os.path.abspath(entry) if os.path.exists(entry or ".") else entry)
    return found


def without_packages_own(path: list[str]) -> list[str]:
    """The path without folders inside installed packages. Packages add them when they are imported
    (setuptools does), at another moment in each process."""
    sites = [p for p in path if os.path.basename(p) in ("site-packages", "dist-packages")]
    return [p for p in path if not any(p.startswith(site + os.sep) for site in sites)]


__all__ = [
    "child_command",
    "child_environment",
    "end_with_parent",
    "enter",
    "module_path",
    "package_root_of",
    "without_packages_own",
]
