"""Restarts under torchrun: one after which ranks can meet again, and one after which they may
not."""

from __future__ import annotations

import pytest

from ddp_ckpt.checkpointer import restarts_share_a_store


@pytest.mark.parametrize(
    ("shares", "restarts", "warned"),
    [("True", "3", True), ("True", "0", False), ("False", "3", False)],
)
def test_ranks_that_may_not_meet_again_are_reported(
    shares: str, restarts: str, warned: bool
) -> None:
    told = {"TORCHELASTIC_USE_AGENT_STORE": shares, "TORCHELASTIC_MAX_RESTARTS": restarts}
    assert restarts_share_a_store(told) == warned


def test_another_launcher_has_no_such_store() -> None:
    assert not restarts_share_a_store({})


def test_under_the_shim_each_attempt_has_its_own() -> None:
    told = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"}
    assert restarts_share_a_store(told)
    assert not restarts_share_a_store({**told, "TIERCKPT_ATTEMPT": "1"})
