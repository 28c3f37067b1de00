"""Modules that the last run of a script had imported, for the preload of the next run.

A file under the user's cache folder for each script and interpreter. Only modules of the standard
library and of installed packages are in it: the user's own may change, and have effects when they
are imported.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import site
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

FORMAT = 1
_OURS = ("tierckpt", "ddp_ckpt", "horovod_ckpt")


def folder() -> Path:
    """The user's folder for all runs."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "tierckpt" / "run"


@dataclass(frozen=True)
class Learned:
    """The content of a file."""

    modules: tuple[str, ...] = ()
    """Full names, parents first."""
    refused: tuple[str, ...] = ()
    """Names of packages that cannot be imported before a fork."""


class LearnedFile:
    """The file of one script."""

    def __init__(self, program: str, is_module: bool) -> None:
        self._own = program.partition(".")[0] if is_module else ""
        key = program if is_module else os.path.realpath(program)
        text = "\n".join((key, os.getcwd() if is_module else "", sys.prefix, sys.version))
        name = hashlib.sha256(os.fsencode(text)).hexdigest()[:24]
        self.path = folder() / f"{name}.json"

    def read(self) -> Learned:
        """The content; empty if there is no file of this format."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            content = json.loads(self.path.read_text())
            if content["format"] == FORMAT:
                return Learned(tuple(content["modules"]), tuple(content["refused"]))
        return Learned()

    def write(self, learned: Learned) -> None:
        """Replace the content. A failure has no effect: the next start takes longer."""
        content = {"format": FORMAT, "modules": learned.modules, "refused": learned.refused}
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=self.path.parent, prefix=self.path.stem, delete=False
            ) as file:
                json.dump(content, file)
            os.replace(file.name, self.path)

    def learn(self) -> None:
        """Record the modules that this process has imported, if the file lacks some."""
        known, here = self.read(), self.imported()
        wanted = [name for name in here if name.partition(".")[0] not in known.refused]
        if not set(wanted) <= set(known.modules):
            self.write(Learned(tuple(wanted), known.refused))

    def refuse(self, package: str) -> None:
        """Do not import this package before a fork from now on."""
        known = self.read()
        modules = tuple(name for name in known.modules if name.partition(".")[0] != package)
        self.write(Learned(modules, tuple(sorted({*known.refused, package}))))

    def imported(self) -> list[str]:
        """Names of modules of the standard library and of installed packages, parents first."""
        folders = _installed()
        own = (*_OURS, self._own)
        return [
            name
            for name, module in list(sys.modules.items())
            if not name.startswith("__")
            and name.partition(".")[0] not in own
            and getattr(getattr(module, "__spec__", None), "name", "") == name
            and _origin(module).startswith(folders)
        ]


def _origin(module: object) -> str:
    origin = getattr(getattr(module, "__spec__", None), "origin", None)
    return origin if isinstance(origin, str) else ""


def _installed() -> tuple[str, ...]:
    """Folders of the standard library and of installed packages."""
    found = [
        *site.getsitepackages(),
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib"),
    ]
    if site.ENABLE_USER_SITE and site.USER_SITE:
        found.append(site.USER_SITE)
    return tuple(folder.rstrip(os.sep) + os.sep for folder in found)


__all__ = ["Learned", "LearnedFile"]
