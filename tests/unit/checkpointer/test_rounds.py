"""A boundary without a version, at the number of the version before: no step was made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tierckpt.checkpointer import VOID, Rounds
from tierckpt.config import load_config
from tierckpt.core import LOCAL, MEMORY, Level, Schedule, Version, Versions, Vote
from tierckpt.format import VersionId

TAKEN = VersionId(1, 5)


def read(take: tuple[Level, ...], adapter: int, apart: bool) -> tuple[Version, list[VersionId]]:
    """The version, after its rank has read these votes, and those that are broken."""
    versions, broken = Versions(), list[VersionId]()
    version = versions.open(TAKEN, [MEMORY, LOCAL])
    agreement = SimpleNamespace(versions=versions, apart=False, break_open=broken.append)

    def votes() -> tuple[Vote, None]:
        agreement.apart = apart
        return Vote(adapter=adapter), None

    agreement.read = votes
    quiet: Any = SimpleNamespace(
        agreement=agreement,
        pool=SimpleNamespace(void=lambda id_: None),
        agent=None,
        reports=SimpleNamespace(lose=lambda version, why: None),
        slot_handoff=SimpleNamespace(take_stock=lambda: None),
        promotion=SimpleNamespace(backlog=SimpleNamespace(advance=lambda: None)),
        collect=lambda: None,
    )
    config = load_config({}, {})
    rounds = Rounds(config, Schedule(config), None, quiet)
    rounds._last = TAKEN, take
    rounds.read()
    return version, broken


@pytest.mark.parametrize("take", [(), (MEMORY, LOCAL)])
def test_only_the_version_of_that_boundary_is_void(take: tuple[Level, ...]) -> None:
    version, broken = read(take, VOID, apart=False)
    assert (version.is_void, broken) == (bool(take), [])


@pytest.mark.parametrize("take", [(), (MEMORY, LOCAL)])
def test_only_the_version_of_that_boundary_breaks_if_ranks_are_apart(
    take: tuple[Level, ...],
) -> None:
    version, broken = read(take, 0, apart=True)
    assert (version.is_void, broken) == (False, [TAKEN] if take else [])
