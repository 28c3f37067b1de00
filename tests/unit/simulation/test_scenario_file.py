"""Scenario files: what is read, and what is refused, with a text."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tierckpt.errors import ConfigError
from tierckpt.simulation import EXAMPLES, assignments, merge_trees, read_tree, scenario_of

SMALL: dict[str, Any] = {
    "job": {"step": "1s", "state": "1GB"},
    "levels": {"persistent": {"every": "10m"}},
}


def refusal(**changes: Any) -> str:
    with pytest.raises(ConfigError) as error:
        scenario_of(merge_trees(SMALL, changes), "job.toml")
    text = str(error.value)
    assert text.startswith("job.toml: ")
    return text.removeprefix("job.toml: ")


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_is_a_scenario(name: str) -> None:
    assert scenario_of(tomllib.loads(EXAMPLES[name]), name)


def test_later_values_win() -> None:
    tree = merge_trees(SMALL, assignments(["job.ranks=64", "levels.persistent.every_steps=5"]))
    scenario = scenario_of(tree, "job.toml")
    (level,) = scenario.levels
    assert scenario.job.ranks == 64
    assert (level.every_steps, level.every_seconds) == (5, 0.0), "one interval replaces the other"
    measured = {"failures": {"job_every": "3h", "node_share": 0.5}}
    failures = scenario_of(
        merge_trees(SMALL, measured, {"failures": {"node_every": "3d"}}), ""
    ).failures
    assert (failures.job_every_seconds, failures.node_every_seconds) == (math.inf, 3 * 86400)
    text = scenario_of(merge_trees(SMALL, assignments(["job.state=5TB", "job.step=2s"])), "")
    assert (text.job.state_bytes, text.job.step_seconds) == (5e12, 2.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"failures": {"node_every": "-3d"}}, "[failures] node_every is -259200; it must not be"),
        ({"failures": {"node_every": 0}}, "for no failures leave it out"),
        ({"failures": {"nodes_every": "3d"}}, "unknown key nodes_every; did you mean node_every?"),
        ({"failures": {"node_every": "often"}}, "[failures] node_every: 'often' is not a time"),
        ({"failures": {"job_every": "3h", "node_every": "3d"}}, "give one or the other"),
        ({"failures": {"node_share": 1.5}}, "it is a share, from 0 to 1"),
        ({"failures": {"at": "3h"}}, "not a list of times"),
        ({"job": {"ranks": 0}}, "[job] ranks is 0; it must be more"),
        ({"job": {"ranks": 2.5}}, "[job] ranks is 2.5; give a whole number"),
        ({"job": {"length": "inf"}}, "the simulation would not end; give length"),
        ({"job": {"step": math.inf}}, "[job] step is infinite; give a time that ends"),
        ({"failures": {"store_out": "inf"}}, "[failures] store_out is infinite"),
        ({"levels": {"persistent": {"write": "inf"}}}, "[levels.persistent] write is infinite"),
        (
            {"job": {"length": "inf", "work": "9s"}, "nodes": {"spares": 1, "repair": "inf"}},
            "length",
        ),
        ({"nodes": {"spares": 0.5}}, "[nodes] spares is 0.5; give a whole number"),
        ({"jobs": {}}, "there is an unknown key jobs; did you mean job?"),
        ({"levels": {"persistent": {"every_steps": 0, "every": 0}}}, "has no interval; give"),
        ({"levels": {"persistent": {"every": "dayly"}}}, "or one of young, daly, best, budget"),
        ({"levels": {"memory": {}}}, "[levels.memory] has no interval"),
        ({"levels": {"disk": {}}}, "[levels] has an unknown key disk"),
        ({"levels": {"peer": {}}}, "add [levels.local]"),
        ({"levels": {"local": {"every": "1m"}, "peer": {"every": "1m"}}}, "remove it"),
        ({"levels": {"persistent": {"readers": "all"}}}, "valid: shards, nodes, ranks"),
        ({"constant": {"recovery": "20m"}}, "[constant] replaces all levels"),
        ({"constant": {}}, "[constant] has no recovery"),
        ({"nodes": {"bad_share": 0.1}}, "needs [failures] node_every"),
        ({"bandwidth": {"store": "fast"}}, "[bandwidth] store: 'fast' is not a size"),
        ({"replicas": 0}, "replicas is 0"),
    ],
)
def test_nonsense_is_refused_with_a_text(changes: dict[str, Any], words: str) -> None:
    assert words in refusal(**changes)


def test_costs_that_follow_from_nothing_are_refused() -> None:
    levels = {"persistent": {"every": "10m"}}
    with pytest.raises(ConfigError, match=r"\[job\] has no step"):
        scenario_of({"levels": levels}, "job.toml")
    with pytest.raises(ConfigError, match=r"has no write and no restore, and .* no state"):
        scenario_of({"job": {"step": "1s"}, "levels": levels}, "job.toml")
    known = {"persistent": {"every": "10m", "write": "9s", "restore": "1m"}}
    assert scenario_of({"job": {"step": "1s"}, "levels": known}, "job.toml")


def test_a_job_without_levels_is_refused() -> None:
    with pytest.raises(ConfigError, match="no level takes versions"):
        scenario_of({}, "job.toml")


def test_a_missing_file_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tierckpt simulate --example >"):
        read_tree(tmp_path / "job.toml")
    (tmp_path / "job.toml").write_text("ranks = ")
    with pytest.raises(ConfigError, match="cannot read the scenario"):
        read_tree(tmp_path / "job.toml")
