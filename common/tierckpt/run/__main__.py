"""`python -m tierckpt.run`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from . import launcher as command_line
from . import preload, process, script
from .coordinator import say
from .launcher import HOROVODRUN, Place, place_of
from .preload import LearnedFile
from .shim import Shim

MAX_REFUSED = 8
"""Each costs a start; after these, no module is imported besides torch and the adapters."""
OF_A_RESTART = ("tierckpt.restore.session", "tierckpt.replicas.monitor")
"""Modules that the adapter imports only in a restore, or in a job of several ranks."""
REFUSED = "TIERCKPT_RUN_REFUSED"
"""Packages that were found not to allow a fork, for the process that replaces this one."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a script under a shim. In the script's process it returns, or raises, as the script ends;
    the shim's process ends with it."""
    options = command_line.parse(sys.argv[1:] if arguments is None else arguments)
    script.forget_first_path()
    place, learned = place_of(os.environ), LearnedFile(options.program, options.is_module)
    with process.ends_by_sigterm():
        may_fork = _preload(options, place, learned)
    if may_fork:
        Shim(options, place, learned).supervise()
    script.run_script(options)


def _preload(options: command_line.Options, place: Place, learned: LearnedFile) -> bool:
    """Import what the script will need. False if this process must not fork."""
    known = learned.read()
    refused = {*known.refused, *filter(None, os.environ.pop(REFUSED, "").split(","))}
    adapters = ["ddp_ckpt", *OF_A_RESTART]
    if place.launcher == HOROVODRUN or "horovod" in (m.partition(".")[0] for m in known.modules):
        adapters += ["horovod.torch", "horovod_ckpt"]
    if place.launcher == HOROVODRUN:
        adapters += ["horovod.runner.http.http_server", "horovod.runner.common.util.hosts"]
    try:
        preload.preload((*options.preload, *known.modules), refused, adapters)
    except preload.UnsafeError as error:
        package = error.package if len(refused) < MAX_REFUSED else preload.EVERYTHING
        if package in refused or package in ("torch", "tierckpt", "ddp_ckpt"):
            say(f"{error}: the script runs without a shim, and the launcher handles failures")
            return False
        say(f"{error}: it is left to the script from now on")
        learned.refuse(package)
        os.environ[REFUSED] = ",".join(sorted({*refused, package}))
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    return True


if __name__ == "__main__":
    main()
