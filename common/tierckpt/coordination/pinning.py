"""Pinning: marks that keep a version, by its number, in a running job or at any one place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from tierckpt._text import is_url
from tierckpt.config import Config, PersistentConfig
from tierckpt.core import decisions
from tierckpt.core.levels import LOCAL, PERSISTENT, Level
from tierckpt.errors import PinError, TierckptError
from tierckpt.format.ids import VersionId
from tierckpt.storage.inventory import open_persistent
from tierckpt.storage.marks import LocalPins, PersistentPins

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
    """Pin or unpin a version of this job on every level that has it; return these levels.

    First waits until the work of `await_agent` is complete. A version still on its way to the
    persistent level is pinned there when it is complete, by its marks on the local level. So these
    marks are on all nodes before any rank looks at the persistent level.

    Collective. Raises PinError on all ranks if no level has the version, or one cannot be reached.
    """
    first, local = node.first == group.rank, LocalPins(config.directory)

    def look() -> set[VersionId]:
        if await_agent is not None and not await_agent.outlast(decisions.QUIET_SECONDS):
            where = " and ".join(await_agent.behind()) or "local"
            raise PinError(f"nothing has moved to {where} for {decisions.QUIET_SECONDS:.0f} s")
        return local.named(version) if first else set()

    # A node that has not written its part yet also gets the mark.
    ids = set[VersionId]().union(*_on_all(look, group))

    def mark_local() -> set[str]:
        if not (first and ids):
            return set()
        there = local.pin(ids, everywhere=True) if action == "pin" else local.unmark(ids)
        return {LOCAL} if there else set()

    def mark_there() -> set[str]:
        with _persistent(config.persistent) as pins:
            return {PERSISTENT} if _at(pins, action, version) else set()

    def mark_persistent() -> set[str]:
        where = config.persistent.path
        return _answered(mark_there, where) if where and group.rank == 0 else set()

    done = set[str]().union(*_on_all(mark_local, group), *_on_all(mark_persistent, group))
    if not done:
        raise PinError(f"cannot {action} v{version}: {_NONE[action]} on any level")
    return tuple(level for level in Level if level in done)


def _on_all(ask: Callable[[], T], group: Group) -> list[T]:
    """Return the results of `ask` on every rank; PinError on all if one failed. Collective."""

    def refusal(ranks: list[int], theirs: TierckptError) -> PinError:
        return PinError(f"rank {ranks[0]} cannot reach its pins: {theirs}")

    return gather_or_raise(group, ask, refusal)


def _answered(ask: Callable[[], set[str]], where: str) -> set[str]:
    """Call `ask` in a thread of its own, since a store that hangs would block the job. Return its
    result or raise its error; PinError where there is no answer."""
    answers: list[set[str] | Exception] = []

    def work() -> None:
        try:
            answers.append(ask())
        except Exception as error:
            answers.append(error)

    thread = threading.Thread(target=work, name="tierckpt-pin", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # the limit of threads of the system or container
        raise PinError(str(error)) from error
    thread.join(decisions.QUIET_SECONDS)
    if not answers:
        raise PinError(f"{where} has not answered for {decisions.QUIET_SECONDS:.0f} s")
    (answer,) = answers
    if isinstance(answer, Exception):
        raise answer
    return answer


def mark_at(
    action: Action, version: int, paths: Sequence[str], place: PersistentConfig
) -> list[str]:
    """Pin or unpin a version at places of one job; return the names of the versions that were
    marked.

    A path is a directory of the local level on this node, or a directory or URL of the persistent
    level. `place` has the settings of the store. Writes nothing except marks. Raises PinError where
    no version has that number, OSError and PersistentError.
    """
    marked, there = set[str](), set[int]()
    for path in paths:
        if not is_url(path):
            local = LocalPins(path)
            marked |= {str(v) for v in _at(local, action, version)}
            there |= {v.version for v in (local.versions() if action == "pin" else local.marked())}
        with _persistent(place, path) as pins:
            marked |= {str(v) for v in _at(pins, action, version)}
            there |= {v.id.version for v in (pins.versions() if action == "pin" else pins.marked())}
    if not marked:
        known = ", ".join(f"v{number}" for number in sorted(there)) or "none"
        raise PinError(f"{_NONE[action]} as v{version}; there: {known}")
    return sorted(marked)


def _at(pins: LocalPins | PersistentPins, action: Action, number: int) -> set[Any]:
    """Pin or unpin the versions of a number at one place; returns those that were."""
    versions: Any = pins.named(number)
    return pins.pin(versions) if action == "pin" else pins.unmark(versions)


@contextmanager
def _persistent(place: PersistentConfig, path: str = "") -> Iterator[PersistentPins]:
    with closing(open_persistent(place.at(path or place.path))) as store:
        yield PersistentPins(store)


_NONE = {"pin": "there is no such version", "unpin": "no such version is pinned"}
