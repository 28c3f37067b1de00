"""Process: the agent as a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator

from tierckpt.storage.files import file_lock
from tierckpt.storage.memory.job_directory import take_lock

from . import environment as environment
from .address import TAKEN, AgentSettings
from .priority import lower_priority
from .server import Agent


def _let_go_of_output() -> None:
    """Launchers wait until nobody holds their pipes any more, and notice only then that a rank has
    ended. What trainers are told goes over their sockets: nothing but a traceback is lost."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (1, 2):
        os.dup2(nowhere, fd)
    os.close(nowhere)


def run(settings: AgentSettings, starter_pid: int) -> int:
    """Be the agent; returns the exit status."""
    place = settings.place()
    try:
        fd = take_lock(place.lock)
    except FileNotFoundError:  # the job ended, and left nothing, before this process had begun
        return 0
    if fd is None:
        return TAKEN
    lower_priority(settings.nice)
    listener = place.listen()
    try:
        agent = Agent(settings.linger_seconds, os.environ.pop(environment.VARIABLE, ""))
        with contextlib.closing(agent), _process(starter_pid) as starter:
            agent.serve(listener, _let_go_of_output, starter)
    finally:
        # Only the one who holds the lock may remove these, and the lock goes last.
        listener.close()
        place.address.unlink(missing_ok=True)
        place.lock.unlink(missing_ok=True)
        file_lock.close(fd)
        place.job.remove_if_unused()
    return 0


@contextlib.contextmanager
def _process(pid: int) -> Iterator[int | None]:
    """A descriptor that is readable when the process has ended; None when it has already."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        yield None
        return
    except (OSError, AttributeError):  # a kernel, C library or container without: as if it lived
        fd = os.eventfd(0)
    try:
        yield fd
    finally:
        os.close(fd)


def main() -> None:
    """Entry point of the process: settings, and who started it, in argv."""
    # The agent ends when its trainers have: signals meant for the job must not cut a write short.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    settings = AgentSettings(**json.loads(sys.argv[1]))
    sys.exit(run(settings, int(sys.argv[2])))


__all__ = ["main", "run"]


if __name__ == "__main__":
    main()
