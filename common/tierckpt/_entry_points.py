"""Classes that installed packages declare as entry points."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tierckpt.errors import TierckptError

__all__ = ["find", "load"]


def find(group: str, kind: str, name: str, error: type[TierckptError]) -> Callable[..., Any] | None:
    """The class of a name in a group, None if no package has one. `kind` is the word for it in
    texts. Raises `error` if it cannot be imported."""
    from importlib.metadata import entry_points  # slow to import

    for point in entry_points(group=group, name=name):
        try:
            return point.load()  # type: ignore[no-any-return]
        except Exception as why:  # a foreign package may raise anything at import
            raise error(f"the {kind} {name} ({point.value}) cannot be loaded: {why}") from why
    return None


def load(
    group: str, kind: str, name: str, ours: Iterable[str], error: type[TierckptError]
) -> Callable[..., Any]:
    """As `find`, where `ours` names those that need no package; an unknown name raises, too."""
    from importlib.metadata import entry_points

    if found := find(group, kind, name, error):
        return found
    known = ", ".join(sorted({*ours, *entry_points(group=group).names}))
    raise error(
        f"the {kind} {name!r} is unknown; known are: {known}. If it comes with a package, "
        "install that on every node"
    )
