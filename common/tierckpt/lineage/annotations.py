"""Facts of this process that explain a run to people: who started it, how, and with what, and how
it ended.

Nothing that may be secret: of the command line only a hash, of the environment only the launcher's
name for the launch, of an error only its type. Nothing is imported or started for it, and unknown
facts are empty.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tierckpt._version import __version__
from tierckpt.format.run_record import TRAINING_END
from tierckpt.storage.local.claim_file import user_name
from tierckpt.storage.local.launch import launch_of

FRAMEWORKS = ("torch", "horovod", "lightning", "transformers", "accelerate", "numpy")
"""Modules with versions worth knowing, if the script has imported them."""
LAUNCHERS = {
    "TORCHELASTIC_RUN_ID": "torchrun",
    "HOROVOD_RANK": "horovodrun",
    "OMPI_COMM_WORLD_RANK": "mpirun",
    "PMI_RANK": "mpirun",
    "SLURM_PROCID": "srun",
}
"""Launchers by a variable that each one sets."""
_COMMIT = re.compile(r"[0-9a-f]{40,64}")


def facts_here(node: str = "") -> dict[str, Any]:
    """The facts of this process, as fields of a `RunRecord`. `node` is the node's name in the
    settings. Raises nothing."""
    script = Path(sys.argv[0] if sys.argv and sys.argv[0] else ".")
    return {
        "host": node or socket.gethostname(),
        "user": user_name(os.getuid()),
        "launcher": launcher(os.environ),
        "command": command_hash(sys.argv),
        "git": git_commit(script.parent),
        "software": software(),
    }


def launcher(environment: Mapping[str, str]) -> str:
    """The launcher's own name for this launch, or its kind; empty without one."""
    kind = next((text for name, text in LAUNCHERS.items() if name in environment), "")
    name = launch_of(environment, in_use=True).name
    return name if not kind or name.startswith(kind) else f"{kind}, {name}" if name else kind


def command_hash(arguments: Sequence[str]) -> str:
    """SHA-256 of the arguments: equal for equal command lines, and nothing else can be read."""
    return hashlib.sha256("".join(f"{each}\0" for each in arguments).encode()).hexdigest()


def end_reason(asked: str, abandoned: bool) -> tuple[str, bool]:
    """The reason why the training ends, in words, and whether an error ended it. `asked`: why it
    was asked to end early, if it was; `abandoned`: it ends without a last version."""
    error = (getattr(sys, "last_value", None) or sys.exc_info()[1]) if abandoned else None
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        return f"sys.exit({code})", code != 0
    if error is not None:
        return type(error).__name__, True
    return asked or ("no last version" if abandoned else TRAINING_END), False


def git_commit(folder: Path) -> str:
    """The commit that is checked out around a folder, read from git's files; empty without one."""
    with contextlib.suppress(OSError, UnicodeDecodeError, RuntimeError):
        resolved = folder.resolve()
        for each in (resolved, *resolved.parents):
            if (each / ".git").exists():
                return _commit_of(each / ".git")
    return ""


def _commit_of(place: Path) -> str:
    if place.is_file():  # a worktree, or a submodule
        place = place.parent / place.read_text().removeprefix("gitdir:").strip()
    shared = place
    if (place / "commondir").is_file():
        shared = place / (place / "commondir").read_text().strip()
    head = (place / "HEAD").read_text().strip()
    if not head.startswith("ref:"):
        return head if _COMMIT.fullmatch(head) else ""
    name = head.removeprefix("ref:").strip()
    for folder in (place, shared):
        if (folder / name).is_file():
            return (folder / name).read_text().strip()
    lines = (shared / "packed-refs").read_text().splitlines()
    found = (line.split() for line in lines if not line.startswith(("#", "^")))
    return next((words[0] for words in found if words[1:] == [name]), "")


def software() -> dict[str, str]:
    """Versions of Python, this package, and the frameworks that are imported."""
    found = {"python": platform.python_version(), "tierckpt": __version__}
    for name in FRAMEWORKS:
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            found[name] = str(version)
    return found


__all__ = ["command_hash", "end_reason", "facts_here", "git_commit", "launcher", "software"]
