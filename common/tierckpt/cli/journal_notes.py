"""Journal notes: the steps that only a journal has, for commands that read versions."""

from __future__ import annotations

from collections.abc import Iterator

from tierckpt.journal.listing import reach_of_restart
from tierckpt.offline.survey import Survey


def steps_after(there: Survey) -> Iterator[str]:
    """Yield a sentence if the journal in a survey leads on from the version that a restart takes.
    Reads the journal's files now."""
    reach = reach_of_restart(there)
    if reach is not None and reach.records:
        yield (
            f"the journal leads on from v{reach.base} to v{reach.last}, and only a restart of the "
            "job itself can make its steps. It takes a version of them at its first boundary"
        )


__all__ = ["steps_after"]
