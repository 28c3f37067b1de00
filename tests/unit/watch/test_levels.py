"""One line for each level, from the rows of the catalog."""

from __future__ import annotations

from typing import Any

from tierckpt.agent import LevelStatus
from tierckpt.format import VersionId
from tierckpt.offline import Row
from tierckpt.watch import LevelView, level_views, restart_of, steps_per_second

NOW = 1000.0


def row(version: int, level: str, there: int = 4, generation: int = 1, **more: Any) -> Row:
    values = {"nbytes": 800, "places": ["/none"], **more}
    return Row(version, generation, "run", level, 4, there=set(range(there)), **values)


def views(*rows: Row, agents: tuple[LevelStatus, ...] = ()) -> dict[str, LevelView]:
    found = level_views(rows, NOW, agents, None, {"local": 7.0})
    return {view.level: view for view in found}


def test_the_newest_complete_version_is_shown() -> None:
    seen = views(row(3, "memory"), row(4, "memory"), row(5, "memory", there=2))["memory"]
    assert (seen.version, seen.shards_seen, seen.shards, seen.versions) == (4, 4, 4, 3)


def test_without_a_complete_one_the_newest_part_is_shown() -> None:
    seen = views(row(3, "local", there=2), row(4, "local", there=1))["local"]
    assert (seen.version, seen.shards_seen) == (4, 1)


def test_a_later_run_is_newer_than_a_larger_number() -> None:
    assert views(row(9, "local"), row(5, "local", generation=2))["local"].version == 5


def test_abandoned_versions_and_other_jobs_are_left_out() -> None:
    rows = (row(9, "local", is_past=False), row(8, "memory", elsewhere="other"), row(5, "local"))
    assert {level: view.version for level, view in views(*rows).items()} == {"local": 5}


def test_the_load_comes_from_the_times_of_two_versions() -> None:
    rows = (row(4, "memory", created_seconds=996.0), row(5, "memory", created_seconds=998.0))
    assert views(*rows)["memory"].bytes_per_second == 400.0
    assert views(*rows)["memory"].age_seconds == 2.0
    assert steps_per_second(rows, 998.5) == 0.5
    assert steps_per_second(rows, 998.0 + 100) == 0.01, "it hangs"
    assert views(rows[1])["memory"].bytes_per_second is None
    assert steps_per_second(rows[1:], 998.5) is None
    other_run = row(4, "memory", generation=0, created_seconds=996.0)
    assert steps_per_second([other_run, rows[1]], 998.5) is None


def test_a_level_without_times_has_those_of_other_levels() -> None:
    rows = (row(5, "local", created_seconds=990.0), row(5, "persistent"))
    assert views(*rows)["persistent"].age_seconds == 10.0


def test_what_an_agent_says_comes_before_files_and_events() -> None:
    id_ = VersionId(1, 5)
    agent = LevelStatus("local", newest=id_, newest_at_seconds=995.0, last_bytes=9, last_seconds=3)
    seen = views(row(5, "local"), agents=(agent,))["local"]
    assert (seen.durable_since_seconds, seen.write_bytes_per_second) == (995.0, 3.0)
    assert views(row(5, "local"))["local"].write_bytes_per_second == 7.0


def test_parity_is_the_peer_level() -> None:
    rows = (row(4, "local", parities=4, created_seconds=990.0), row(5, "local"))
    seen = views(*rows)
    assert list(seen) == ["local", "peer"]
    assert (seen["peer"].version, seen["peer"].shards_seen) == (4, 4)
    assert seen["peer"].age_seconds == 10.0


def test_a_restart_takes_what_the_catalog_says() -> None:
    taken = row(5, "local", next=True, iteration=50, created_seconds=990.0)
    found = restart_of([row(4, "local"), taken], NOW)
    assert found is not None
    assert (found.version, found.iteration, found.levels) == (5, 50, ("local",))
    assert found.age_seconds == 10.0
    assert restart_of([row(4, "local")], NOW) is None
