"""Scenario files: TOML, with times and sizes as people write them.

A key has no unit in its name: the value has one (`step = "1.5s"`, `state = "201MB"`). Values given
on the command line replace those of the file, and these replace those measured from events.
"""

from __future__ import annotations

import math
import tomllib
import typing
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from tierckpt._text import near_names, question
from tierckpt._units import bytes_of, seconds_of
from tierckpt.errors import ConfigError

from .scenario import (
    LEVELS,
    POLICIES,
    Bandwidth,
    Constant,
    Failures,
    Job,
    Level,
    Nodes,
    Restart,
    Scenario,
    check,
)

TABLES: dict[str, type] = {
    "job": Job,
    "failures": Failures,
    "nodes": Nodes,
    "bandwidth": Bandwidth,
    "restart": Restart,
    "constant": Constant,
}
TOP = ("replicas", "seed", "overhead_budget")
CHOICES = {
    "readers": ("shards", "nodes", "ranks"),
    "domain": ("node", "rack"),
}
RIVALS = (
    ({"every"}, {"every_steps"}),
    ({"job_every", "node_share"}, {"process_every", "reboot_every", "node_every", "rack_every"}),
)
"""Keys of one table that replace each other: the interval of a level, and the rates of failures."""

Tree = dict[str, Any]


def read(path: Path) -> Tree:
    """The tables of a file. Raises ConfigError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no file {path}; `tierckpt simulate --example > {path}` writes one to start "
            "from"
        ) from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read the scenario {path}: {error}") from error


def merge(*trees: Mapping[str, Any]) -> Tree:
    """The tables with the values of all; later ones win, also over their rivals (see RIVALS)."""
    merged: Tree = {}
    for tree in trees:
        for key, value in tree.items():
            if isinstance(value, Mapping):
                before = merged.get(key, {})
                if not isinstance(before, Mapping):
                    raise ConfigError(f"{key} is a value and a table; it can be one of them")
                merged[key] = merge(_without_rivals(before, value), value)
            else:
                merged[key] = value
    return merged


def _without_rivals(before: Mapping[str, Any], value: Mapping[str, Any]) -> Tree:
    replaced: set[str] = set()
    for ones, others in RIVALS:
        replaced |= others if ones & value.keys() else set()
        replaced |= ones if others & value.keys() else set()
    return {key: each for key, each in before.items() if key not in replaced}


def assignments(texts: Iterable[str]) -> Tree:
    """The tables that `--set TABLE.KEY=VALUE` describes. Raises ConfigError."""
    found: Tree = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"--set {text}: write a name and a value, such as job.ranks=1024")
        found = merge(found, assignment(name, value))
    return found


def assignment(name: str, text: str) -> Tree:
    """The table for one value given as text."""
    try:
        value = tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        value = text
    tree: Any = value
    for part in reversed(name.strip().split(".")):
        tree = {part: tree}
    return dict(tree)


def scenario_of(tree: Mapping[str, Any], source: str) -> Scenario:
    """The checked scenario. Raises ConfigError that names the key, and `source`."""
    try:
        scenario = _build(tree)
        check(scenario)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    return scenario


def _build(tree: Mapping[str, Any]) -> Scenario:
    given: Tree = {}
    for key, value in tree.items():
        if key == "levels":
            given["levels"] = _levels(value)
        elif key in TABLES:
            given[key] = TABLES[key](**_arguments(TABLES[key], value, f"[{key}]"))
        elif key in TOP:
            given[key] = _convert(Scenario, key, value, "")
        else:
            _refuse(key, "", (*TABLES, "levels", *TOP))
    scenario = Scenario(**given)
    _check_given(tree.get("job", {}), scenario.levels)
    return scenario


def _check_given(job: Mapping[str, Any], levels: Iterable[Level]) -> None:
    """Refuse levels without the figures that their costs follow from."""
    for level in levels:
        if "step" not in job:
            raise ConfigError('[job] has no step; give its duration, such as step = "1.5s"')
        named = {"write": level.write_seconds, "restore": level.restore_seconds}
        unknown = [name for name, seconds in named.items() if seconds is None]
        if unknown and "state" not in job:
            raise ConfigError(
                f"[levels.{level.name}] has no {' and no '.join(unknown)}, and [job] no state to "
                'compute it from; give state = "14GB", the size of one copy'
            )


def _levels(value: object) -> tuple[Level, ...]:
    if not isinstance(value, Mapping):
        raise ConfigError("levels is not a table; write [levels.memory] and so on")
    for name in value:
        if name not in LEVELS:
            _refuse(name, "[levels]", LEVELS)
    found = []
    for name in LEVELS:
        if name in value:
            arguments = _arguments(Level, value[name], f"[levels.{name}]")
            found.append(Level(name, **arguments))
    return tuple(found)


def _arguments(kind: type, value: object, where: str) -> Tree:
    """The arguments of a dataclass from a table of the file."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} is not a table")
    keys = {
        each.name.removesuffix("_seconds").removesuffix("_bytes"): each.name
        for each in fields(kind)
    }
    if kind is Level:
        del keys["name"], keys["policy"]
    if kind is Constant and "recovery" not in value:
        raise ConfigError('[constant] has no recovery; give recovery = "20m"')
    found: Tree = {}
    for key, each in value.items():
        if key not in keys:
            _refuse(key, where, keys)
        if kind is Level and key == "every" and each in POLICIES:
            found["policy"] = each
        else:
            found[keys[key]] = _convert(kind, keys[key], each, f"{where} ")
    return found


def _refuse(key: str, where: str, known: Iterable[str]) -> typing.NoReturn:
    known = [*known]
    hint = question(near_names(key, known))
    raise ConfigError(
        f"{where}{' has an' if where else 'there is an'} unknown key {key}; {hint}"
        f"Valid ones: {', '.join(known)}"
    )


def _convert(kind: type, name: str, value: object, where: str) -> object:
    """A value in the type of its field."""
    shown = name.removesuffix("_seconds").removesuffix("_bytes")
    wanted = typing.get_type_hints(kind)[name]
    try:
        if name == "at_seconds":
            return _times(value)
        if name.endswith("_seconds"):
            return _every(value) if name == "every_seconds" else _time(value)
        if name.endswith("_bytes"):
            return bytes_of(value)
    except ConfigError as error:
        raise ConfigError(f"{where}{shown}: {error}") from None
    if name in CHOICES and value not in CHOICES[name]:
        raise ConfigError(f"{where}{shown} is {value!r}; valid: {', '.join(CHOICES[name])}")
    if wanted is float and value == "inf":
        return float("inf")
    accepted = (int, float) if wanted is float else wanted
    if not isinstance(value, accepted) or (isinstance(value, bool) and wanted is not bool):
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
        raise ConfigError(f"{where}{shown} is {value!r}; give {words[wanted]}")
    return value


def _time(value: object) -> float:
    """A time with its unit, without which 200 could be milliseconds or seconds."""
    seconds = seconds_of(value)
    if seconds and math.isfinite(seconds) and not str(value).strip()[-1].isalpha():
        raise ConfigError(f"{value!r} has no unit; write for example '{value}s' or '{value}ms'")
    return seconds


def _times(value: object) -> tuple[float, ...]:
    if not isinstance(value, list):
        raise ConfigError(f"{value!r} is not a list of times; write for example ['90m', '3h']")
    found = tuple(_time(each) for each in value)
    if found and not 0 <= min(found) <= max(found) < math.inf:
        raise ConfigError(f"{value!r} has a time that is negative or infinite")
    return found


def _every(value: object) -> float:
    try:
        return _time(value)
    except ConfigError as error:
        raise ConfigError(f"{error}, or one of {', '.join(POLICIES)}") from None
