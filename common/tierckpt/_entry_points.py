"""Classes that installed packages declare as entry points."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tierckpt.errors import TierckptError

__all__ = ["load"]


def load(
    group: str, kind: str, name: str, ours: Iterable[str], error: type[TierckptError]
) -> Callable[..., Any]:
    """The class of a name in a group. `kind` is the word for it in texts, `ours` the names that
    need no package. Raises `error` for an unknown one, and for one that cannot be imported."""
    from importlib.metadata import entry_points  # slow to import

    theirs = {point.name: point for point in entry_points(group=group)}
    if name not in theirs:
        known = ", ".join(sorted({*ours, *theirs}))
        raise error(
            f"the {kind} {name!r} is unknown; known are: {known}. If it comes with a package, "
            "install that on every node"
        )
    try:
        return theirs[name].load()  # type: ignore[no-any-return]
    except Exception as why:  # a foreign package may raise anything at import
        raise error(f"the {kind} {name} ({theirs[name].value}) cannot be loaded: {why}") from why
