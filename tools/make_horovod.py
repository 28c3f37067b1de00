"""Make a Horovod that works with this Python's torch: make_horovod.py [--check] [--for-tests].

Run by the Python that is to have it. Wheels are kept in the user's cache, each in a folder named
after what it is bound to, and none known not to work. --check installs nothing: it tells
what is there (status 1: nothing that works). --for-tests continues without Horovod (status 0), and
says loudly what that means.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import os
import shutil
import signal
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from bootstrap import pip_install
from horovod_build import build, explain, fetch, say
from horovod_target import (
    NotPossible,
    Target,
    mpi_compiler,
    mpi_unwanted,
    require_tools,
    this_target,
)

# This Python may have no Tierckpt; the probe needs the standard library alone.
sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))
from tierckpt.doctor.probes import Horovod, probe

# What Horovod imports, and what its setup.py wants to be there.
NEEDS = ("cloudpickle", "psutil", "pyyaml", "packaging", "cffi", "setuptools", "wheel")
NEEDS_FOR_MPI = ("mpi4py>=4",)

WITHOUT = """\
*** The tests of Horovod will NOT run (each is reported as skipped, by name), because
*** {reason}"""

KEPT = """\
*** {found}. It stays as it is, because
*** {reason}"""


class Untried(NotPossible):
    """Nothing could be learnt of a wheel."""


NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def starred(reason: NotPossible) -> str:
    return str(reason).replace("\n", "\n*** ")


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """What the system refuses (a full disk, a folder that can't be written) is a NotPossible."""
    try:
        yield
    except OSError as error:
        raise NotPossible(explain("this machine can't do it", str(error))) from error


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a Horovod that works with the torch here.")
    parser.add_argument("--check", action="store_true", help="tell what is there, install nothing")
    parser.add_argument("--for-tests", action="store_true", help="go on where it is not possible")
    arguments = parser.parse_args()
    # Like Ctrl-C: compilers are stopped and half-made files removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with plain_errors():
            if arguments.check:
                check()
            else:
                make(again=not arguments.for_tests)
    except NotPossible as reason:
        if not arguments.for_tests:
            sys.exit(f"[horovod] no Horovod here:\n{reason}")
        print(WITHOUT.format(reason=starred(reason)), flush=True)
    except KeyboardInterrupt as end:
        sys.exit(f"[horovod] interrupted; {str(end) or 'nothing half-made is left'}")


def check() -> None:
    """Tell what is there. Raises NotPossible if nothing works."""
    found = probe()
    if found.missing:
        raise NotPossible(f"{found.missing} ({sys.executable}); make horovod builds one")
    say(describe(found))


def make(again: bool) -> None:
    """Make sure that there is one. `again`: also try what failed before. Raises NotPossible.

    One that works is kept where a better one can't be had: MPI may have come later, and in part.
    """
    found = probe()
    if not (reason := lack(found)):
        say(f"{describe(found)}: nothing to do")
        return
    say(f"Horovod for the torch of {sys.executable}: {reason}")
    try:
        with plain_errors():
            say(f"ready: {describe(mend(again))}")
    except NotPossible as failure:
        found = probe()
        if found.missing:
            raise
        print(KEPT.format(found=describe(found), reason=starred(failure)), flush=True)


def mend(again: bool) -> Horovod:
    """Install what is missing, from the cache or built again; returns what is there then.

    Raises NotPossible.
    """
    target = this_target()
    folder = cache_folder(target)
    with only_one(folder):
        install_needs(target)
        # mpi4py may have been all that was missing, and another process may have done the rest.
        if lack(probe()):
            wheel = cached_wheel(folder, target) or new_wheel(folder, target, again)
            say(f"installing {wheel.name}")
            install = ["--no-deps", "--no-index", "--force-reinstall", str(wheel)]
            if not installed(*install):
                raise NotPossible(f"pip could not install {wheel}, for the reason above.")
    found = probe()
    if reason := lack(found):
        raise NotPossible(f"everything is installed, but {reason}")
    return found


def lack(found: Horovod) -> str:
    """What there is to do; empty: nothing."""
    with_mpi = "mpi" in found.transports
    if mpi_unwanted() and with_mpi:
        return "it is with MPI, and HOROVOD_WITHOUT_MPI=1 wants it without"
    if found.missing or mpi_compiler() is None:
        return found.missing
    return found.no_mpi4py if with_mpi else "it is without MPI, and MPI is here"


def describe(found: Horovod) -> str:
    return f"{found} works" + (
        f"; no jobs over MPI: {found.mpi_missing}" if found.mpi_missing else ""
    )


def install_needs(target: Target) -> None:
    needs = [*NEEDS, *(NEEDS_FOR_MPI if target.mpi else ())]
    say(f"installing what it needs: {', '.join(needs)}")
    if not installed(*needs):
        raise NotPossible(
            "pip could not install what Horovod needs, for the reason above.\n"
            "Check the network and pip's index, then run make horovod again."
        )


def installed(*arguments: str) -> bool:
    """Have pip install that here; False if it failed. An interruption says what it leaves."""
    try:
        return pip_install(Path(sys.executable), *arguments)
    except KeyboardInterrupt:
        left = "what pip was installing may be here in part: make horovod puts it right"
        raise KeyboardInterrupt(left) from None


# --- the cache -----------------------------------------------------------------------------------


def cache_folder(target: Target) -> Path:
    """This target's folder in the user's cache. Raises NotPossible if it can't be made."""
    folder = caches() / "tierckpt" / "wheels" / target.key
    # Horovod's CMake files take the build's path for a regular expression: with a + in it the wheel
    # comes out without its library.
    if unfit := set(str(folder)) & set("+*?()[]{}|^$\\;#\"' \t\n"):
        raise NotPossible(
            f"Horovod can't be built in {folder}: CMake trips over {' '.join(sorted(unfit))!r}.\n"
            "XDG_CACHE_HOME names another folder for caches."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "lock").touch()
    except OSError as error:
        raise NotPossible(
            f"there is no place for its wheel: {error}.\n"
            "XDG_CACHE_HOME names another folder for caches."
        ) from error
    return folder


def caches() -> Path:
    """The user's folder for caches. Raises NotPossible where the user has none."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute()
    except RuntimeError as error:
        raise NotPossible(
            f"there is no place for its wheel: {str(error).rstrip('.')} (set HOME).\n"
            "XDG_CACHE_HOME names another folder for caches."
        ) from error


@contextlib.contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Let one process at a time work in the folder.

    The kernel gives the lock back when its holder dies, however it dies. What such a one left
    behind is removed here: only the holder makes files in the folder.
    """
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is making the same wheel: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        for left in folder.glob("scratch-*"):
            shutil.rmtree(left, ignore_errors=True)
        yield


def cached_wheel(folder: Path, target: Target) -> Path | None:
    """The cached wheel if it still works; one that does not is removed.

    Raises Untried, and leaves it, where that can't be found out.
    """
    for wheel in folder.glob("*.whl"):
        bad = fault(wheel, target)
        if not bad:
            say(f"using the wheel in {folder}")
            return wheel
        say(f"the wheel in {folder} is of no use ({bad}): building another one")
        wheel.unlink()
    return None


def new_wheel(folder: Path, target: Target, again: bool) -> Path:
    """Build a wheel, try it, then put it into the cache, whole or not at all.

    Raises NotPossible, or Untried with the wheel in the cache all the same. A build that
    failed, after minutes, is remembered by its log.
    """
    log, failed_log = folder / "build.log", folder / "failed.log"
    if failed_log.exists() and not again:
        raise NotPossible(f"its build failed before ({failed_log}); make horovod tries again.")
    with tempfile.TemporaryDirectory(prefix="scratch-", dir=folder) as name:
        scratch = Path(name)
        require_tools()
        source = fetch(scratch)
        try:
            built = build(target, source, scratch, log)
            if bad := fault(built, target):
                raise NotPossible(f"it was built, but {bad}.")
        except Untried:
            built.replace(folder / built.name)  # the next one to use it tries it
            raise
        except NotPossible as reason:
            log.replace(failed_log)
            raise NotPossible(f"{reason}\nThe whole log: {failed_log}") from reason
        failed_log.unlink(missing_ok=True)
        return built.replace(folder / built.name)


def fault(wheel: Path, target: Target) -> str:
    """What is wrong with the wheel, tried without installing it; empty: it works.

    Raises OSError where there is no room to try it, Untried where that did not end by itself.
    """
    with tempfile.TemporaryDirectory(prefix="scratch-", dir=wheel.parent) as unpacked:
        try:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(unpacked)
        except Exception as error:  # a damaged archive raises nearly anything
            if getattr(error, "errno", None) in NO_ROOM:
                raise
            return f"it can't be unpacked: {error}"
        found = probe(Path(unpacked))
    if found.untold:
        raise Untried(
            f"{wheel.name} could not be tried: {found.missing}.\n"
            "That says nothing of it (memory may have run out), so it is kept: make horovod tries "
            "again."
        )
    lacking = set(target.transports) - set(found.transports)
    return found.missing or (f"it is without {', '.join(lacking)}" if lacking else "")


if __name__ == "__main__":
    main()
