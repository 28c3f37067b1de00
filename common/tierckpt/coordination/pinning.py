"""Pinning by a version's number: in a running job, on all its nodes, and at any one place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from tierckpt._text import is_url
from tierckpt.config import Config, PersistentConfig
from tierckpt.core import stall_timeout
from tierckpt.core.levels import LOCAL, PERSISTENT, Level
from tierckpt.errors import ConfigError, PinError, TierckptError
from tierckpt.format.ids import VersionId
from tierckpt.storage.local.pins import LocalPins
from tierckpt.storage.persistent import PersistentStore
from tierckpt.storage.persistent.pins import PersistentPins

from .error_barrier import gather_or_raise

if TYPE_CHECKING:
    from tierckpt.agent.client import AgentClient
    from tierckpt.group import Group, Node

Action = Literal["pin", "unpin"]
T = TypeVar("T")


def mark_everywhere(
    action: Action,
    version: int,
    config: Config,
    group: Group,
    node: Node,
    await_agent: AgentClient | None = None,
) -> tuple[str, ...]:
    """Pin or unpin a version of this job on every level that has it; returns these levels. Before
    that, wait until what `await_agent` has under way is there.

    A version that is still to come to the persistent level is pinned there when it is complete, by
    its marks on the local level. So these are on all nodes before anybody looks there.

    Collective. Raises PinError, on all ranks, where no level has it, or one cannot be asked.
    """
    first, local = node.first == group.rank, LocalPins(config.directory)

    def look() -> set[VersionId]:
        if await_agent is not None and not await_agent.outlast(stall_timeout.QUIET_SECONDS):
            where = " and ".join(await_agent.behind()) or "local"
            raise PinError(f"nothing has moved to {where} for {stall_timeout.QUIET_SECONDS:.0f} s")
        return local.named(version) if first else set()

    # A node that has not written its part yet gets the mark, too.
    ids = set[VersionId]().union(*_told(look, group))

    def mark_local() -> set[str]:
        if not (first and ids):
            return set()
        there = local.pin(ids, everywhere=True) if action == "pin" else local.unpin(ids)
        return {LOCAL} if there else set()

    def mark_there() -> set[str]:
        with _persistent(config.persistent) as pins:
            return {PERSISTENT} if getattr(pins, action)(pins.named(version)) else set()

    def mark_persistent() -> set[str]:
        where = config.persistent.path
        return _answered(mark_there, where) if where and group.rank == 0 else set()

    done = set[str]().union(*_told(mark_local, group), *_told(mark_persistent, group))
    if not done:
        raise PinError(f"cannot {action} v{version}: {_NONE[action]} on any level")
    return tuple(level for level in Level if level in done)


def _told(ask: Callable[[], T], group: Group) -> list[T]:
    """What `ask` returned on every rank; PinError on all if it failed on any. Collective."""

    def refusal(ranks: list[int], theirs: TierckptError) -> PinError:
        return PinError(f"rank {ranks[0]} cannot reach its pins: {theirs}")

    return gather_or_raise(group, ask, refusal)


def _answered(ask: Callable[[], set[str]], where: str) -> set[str]:
    """What `ask` returns, from a thread of its own: a store that hangs would keep the job. Raises
    what it does, and PinError where there is no answer."""
    told: list[set[str] | Exception] = []

    def work() -> None:
        try:
            told.append(ask())
        except Exception as error:
            told.append(error)

    thread = threading.Thread(target=work, name="tierckpt-pin", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # as many as the system, or the container, allows
        raise PinError(str(error)) from error
    thread.join(stall_timeout.QUIET_SECONDS)
    if not told:
        raise PinError(f"{where} has not answered for {stall_timeout.QUIET_SECONDS:.0f} s")
    (answer,) = told
    if isinstance(answer, Exception):
        raise answer
    return answer


def mark_at(action: Action, version: int, path: str, place: PersistentConfig) -> list[str]:
    """Pin or unpin a version at one place: a directory of the local level, on this node, or one, or
    a URL, of the persistent level. `place` has what the store is to be told. Returns the names of
    what was marked.

    Makes nothing but marks. Raises PinError where nothing has that number, ConfigError for what is
    no directory, OSError and PersistentError.
    """
    marked, there = set[str](), set[int]()
    if not is_url(path):
        if not Path(path).is_dir():
            raise ConfigError(f"{path} is no directory; give a job's path, or its persistent_path")
        local = LocalPins(path)
        marked |= {str(v) for v in getattr(local, action)(local.named(version))}
        there |= {v.version for v in (local.versions() if action == "pin" else local.pinned())}
    with _persistent(place, path) as pins:
        marked |= {str(v) for v in getattr(pins, action)(pins.named(version))}
        there |= {v.id.version for v in (pins.versions() if action == "pin" else pins.pinned())}
    if not marked:
        known = ", ".join(f"v{number}" for number in sorted(there)) or "none"
        raise PinError(f"{path}: {_NONE[action]} as v{version}; there: {known}")
    return sorted(marked)


@contextmanager
def _persistent(place: PersistentConfig, path: str = "") -> Iterator[PersistentPins]:
    there = place.at(path or place.path)
    with closing(PersistentStore(there.path, **there.options())) as store:
        yield PersistentPins(store)


_NONE = {"pin": "there is no such version", "unpin": "no such version is pinned"}
