"""The last word about older versions, before a slot is overwritten: with and without a wait."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tierckpt.config import load_config
from tierckpt.coordination import Agreement, RankGoneError, ballots_for
from tierckpt.core import BROKEN, DONE, MEMORY, PENDING, VOTE_WIDTH
from tierckpt.format import VersionId
from tierckpt.group import Node
from tierckpt.testing import ThreadGroup, run_ranks

OLD, NEW, NOW = VersionId(1, 9), VersionId(1, 10), VersionId(1, 11)


def agreement_of(group: ThreadGroup) -> tuple[Agreement, Any]:
    """An agreement in which v9 is safe and v10 is open, and its ballots on a page."""
    box = ballots_for(group, Node(0, 1, tuple(range(group.size))), VOTE_WIDTH)
    agreement = Agreement(group, box, load_config({}, {}), lambda *_: None, lambda: None)
    agreement.restart(safe={MEMORY: OLD})
    agreement.open(NEW, ())
    return agreement, box


@pytest.mark.parametrize(
    ("states", "proven"),
    [
        ((DONE, DONE), {NEW}),
        ((DONE, BROKEN), {OLD}),
        ((BROKEN, BROKEN), {OLD}),
        ((DONE, PENDING), {OLD, NEW}),
    ],
)
def test_without_a_wait_it_is_the_word_of_all_or_nothing_new(
    states: tuple[int, int], proven: set[VersionId]
) -> None:
    def program(group: ThreadGroup) -> list[set[VersionId]]:
        agreement, _ = agreement_of(group)
        if states[group.rank] != PENDING:
            agreement.tell(MEMORY, NEW, states[group.rank])
        before = {OLD, NEW}
        found = [agreement.last_word(before, waits=False)]  # nothing was cast
        if group.rank == 1:
            group.barrier()
        agreement.launch(NOW)
        if group.rank == 0:
            found.append(agreement.last_word(before, waits=False))  # the other has not voted
            group.barrier()
        group.barrier()
        found += [agreement.last_word(before, waits=False), agreement.last_word(before)]
        group.barrier()
        agreement.close()
        return found

    first, second = run_ranks(2, program)
    assert first == [{OLD, NEW}] * 2 + [proven] * 2
    assert second == [{OLD, NEW}] + [proven] * 2


def test_without_a_wait_a_lost_rank_proves_nothing() -> None:
    def program(group: ThreadGroup) -> tuple[set[VersionId], str]:
        agreement, box = agreement_of(group)
        if group.rank == 1:
            group.barrier()
            agreement.close()
            return set(), ""
        os.close(box._processes[1])
        pid = os.posix_spawn("/bin/true", ["true"], {})
        box._processes[1] = os.pidfd_open(pid)
        os.waitpid(pid, 0)
        agreement.tell(MEMORY, NEW, DONE)
        agreement.launch(NOW)
        kept = agreement.last_word({OLD, NEW}, waits=False)
        with pytest.raises(RankGoneError) as error:
            agreement.last_word({OLD, NEW})
        group.barrier()
        agreement.close()
        return kept, str(error.value)

    (kept, text), _ = run_ranks(2, program)
    assert kept == {OLD, NEW}
    assert "rank 1" in text
