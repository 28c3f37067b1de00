"""The agent's process."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
from collections.abc import Iterator

from tierckpt.storage import file_lock
from tierckpt.storage.job_directory import take_lock

from . import address as environment
from .address import TAKEN, AgentFiles, AgentSettings
from .processor import lower_priority
from .server import Agent
from .status import StatusServer


def _detach_output() -> None:
    """Redirect the output to /dev/null. Launchers notice the end of a rank only when no process
    holds their pipes any more. Trainers get messages over sockets, so only a traceback is lost."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (1, 2):
        os.dup2(nowhere, fd)
    os.close(nowhere)


def run(settings: AgentSettings, starter_pid: int) -> int:
    """Run the agent until it ends; returns the exit status."""
    place = settings.place()
    try:
        fd = take_lock(place.lock)
    except FileNotFoundError:  # the job ended and removed its folder before this process started
        return 0
    if fd is None:
        return TAKEN
    if settings.peers:  # at the trainers' priority, since they wait for this when nodes meet
        importlib.import_module("tierckpt.agent.protector")
    lower_priority()
    listener = place.listen()
    try:
        agent = Agent(settings.linger_seconds, os.environ.pop(environment.ENVIRONMENT_VARIABLE, ""))
        with contextlib.closing(agent), _process(starter_pid) as starter, _watchers(place, agent):
            agent.serve(listener, _detach_output, starter)
    finally:
        # Only the holder of the lock may remove these, and the lock goes last.
        listener.close()
        place.address.unlink(missing_ok=True)
        place.status_address.unlink(missing_ok=True)
        place.lock.unlink(missing_ok=True)
        file_lock.close(fd)
        place.job.remove_if_unused()
    return 0


@contextlib.contextmanager
def _watchers(place: AgentFiles, agent: Agent) -> Iterator[None]:
    """Answer watchers. If it cannot, the agent works without them."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, RuntimeError):
            listener = place.listen_for_watchers()
            stack.enter_context(contextlib.closing(StatusServer(listener, agent.status)))
        yield


@contextlib.contextmanager
def _process(pid: int) -> Iterator[int | None]:
    """A descriptor that becomes readable when the process ends; None when it has ended already."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        yield None
        return
    except (OSError, AttributeError):  # not supported here: as if the process never ended
        fd = os.eventfd(0)
    try:
        yield fd
    finally:
        os.close(fd)


def main() -> None:
    """Entry point of the process: argv has the settings, and the starter's process id."""
    # The agent ends after its trainers: signals meant for the job must not interrupt a write.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    settings = AgentSettings(**json.loads(sys.argv[1]))
    sys.exit(run(settings, int(sys.argv[2])))


__all__ = ["main", "run"]


if __name__ == "__main__":
    main()
