"""Settings are equal on all ranks, or all ranks name those with others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tierckpt.coordination import agree_on_settings
from tierckpt.errors import ConfigError
from tierckpt.testing import run_ranks


def refusals(arguments: list[dict[str, Any]]) -> list[str]:
    """Return every rank's error for its arguments; empty where it has none."""

    def attach(group: Any) -> str:
        try:
            agree_on_settings(arguments[group.rank], None, group)
        except ConfigError as error:
            return str(error)
        return ""

    return run_ranks(len(arguments), attach)


def test_a_rank_that_differs_is_named_on_all_with_the_difference() -> None:
    given = [{"local_keep": 2}, {"local_keep": 2}, {"local_keep": 3}]
    for text in refusals(given):
        assert text.startswith("rank 2 and rank 0 have different settings")
        assert "local_keep=3 there, and local_keep=2 on rank 0" in text
        assert "every_steps" not in text


def test_all_that_differ_in_the_same_way_are_named() -> None:
    for text in refusals([{}, *[{"slots": 4}] * 3, {"slots": 5}]):
        assert text.startswith("ranks 1, 2, 3 and rank 0")
    for text in refusals([{}, *[{"slots": 4}] * 10]):
        assert text.startswith("ranks 1, 2, 3, 4, 5, 6, 7, 8 and 2 more and rank 0")


def test_settings_that_cannot_be_used_on_one_are_an_error_on_all() -> None:
    for text in refusals([{}, {"slots": "many"}]):
        assert text.startswith("rank 1: slots in the arguments is 'many'")


def test_places_may_differ_and_all_receive_each_others() -> None:
    def attach(group: Any) -> Any:
        mine = {"path": f"here{group.rank}", "node": f"node{group.rank}"}
        return agree_on_settings({**mine, "peer_domain": f"rack{group.rank}"}, None, group)

    (one, topology), (other, same) = run_ranks(2, attach)
    assert topology == same
    assert [host.split("/")[0] for host in topology.hosts] == ["node0", "node1"]
    assert topology.domains == ("rack0", "rack1")
    assert (one.path[-1], other.path[-1]) == ("0", "1")


def test_storage_options_are_compared_and_not_shown() -> None:
    given = [{"persistent_storage_options": {"secret": each}} for each in ("sesame", "poppy")]
    for text in refusals(given):
        assert "persistent_storage_options, with values that are not shown" in text
        assert "sesame" not in text
        assert "poppy" not in text
    assert refusals([given[0], given[0]]) == ["", ""]


def test_two_containers_with_one_name_are_not_one_node(tmp_path: Path, shm_dir: Path) -> None:
    """Their memories are two file systems; the pods' names make them two nodes."""
    memories = [{"shm_dir": shm_dir}, {"shm_dir": tmp_path}, {"shm_dir": tmp_path}]
    for text in refusals(memories):
        assert text.startswith("ranks 0 and 1 are on one node by its name, ")
        assert "TIERCKPT_NODE" in text
    named = [each | {"node": f"pod{rank}"} for rank, each in enumerate(memories)]
    assert refusals(named) == [""] * 3
    assert refusals([{"shm_dir": shm_dir}, {"shm_dir": shm_dir.parent}]) == [""] * 2
