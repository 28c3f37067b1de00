"""Sources: constructor arguments over `TIERCKPT_*` variables over a TOML file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tierckpt._text import near_names, question
from tierckpt.errors import ConfigError

from .config import Config, known_settings
from .level_tables import AUTO, AUTOMATIC, STORAGE_OPTIONS, TABLES
from .places import make_absolute

PREFIX = "TIERCKPT_"
NOT_SETTINGS = (
    *("ATTEMPT", "CONFIG", "ENCRYPTION_KEY", "ENCRYPTION_KEY_FILE", "FAULTS", "FAULTS_DIR"),
    *("PROVE_DIR", "COPY_ENGINE", "RESTART"),
)
"""Variables with the prefix that are not settings."""
GIVEN = "the arguments"
ARGUMENTS = (
    "extra",
    "extra_per_rank",
    "on_event",
    "callbacks",
    "config_file",
    "comm_hook",
    "group",
)
"""Arguments of a Checkpointer that are not settings; a misspelled one gets a hint, too."""
UNITS = ("seconds", "steps", "bytes")
"""Units in the names of settings."""
KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def load_config(
    arguments: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    config_file: str | os.PathLike[str] | None = None,
) -> Config:
    """Merge the three sources. Raises ConfigError that names the setting and its source.

    TIERCKPT_CONFIG may also name the `config_file`; without either no file is read.
    """
    environment = os.environ if environment is None else environment
    config_file = config_file or environment.get(PREFIX + "CONFIG") or None
    flat: dict[str, Any] = {}
    if config_file is not None:
        flat.update(_from_file(Path(config_file).expanduser()))
    for name, text in environment.items():
        _refuse_another_prefix(name)
        if name.startswith(PREFIX) and name.removeprefix(PREFIX) not in NOT_SETTINGS:
            key = name.removeprefix(PREFIX).lower()
            flat[key] = _convert(key, text, f"the environment variable {name}")
    for key, value in (arguments or {}).items():
        if value is not None:
            flat[key] = _convert(key, value, GIVEN)
    return _build(flat)


def _refuse_another_prefix(variable: str) -> None:
    """Raise ConfigError for a variable that is a setting's but for the prefix."""
    prefix, _, name = variable.partition("_")
    known = name.lower() in known_settings() and f"{prefix}_" != PREFIX
    if known and near_names(f"{prefix.upper()}_", [PREFIX], cutoff=0.8):
        meant = question([PREFIX + name.upper()])
        raise ConfigError(
            f"the environment variable {variable} has no effect: {meant}"
            "Rename it, or unset it if it is another program's"
        )


def _from_file(path: Path) -> dict[str, Any]:
    import tomllib  # most jobs have no file

    try:
        with path.open("rb") as file:
            content = tomllib.load(file)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error}") from error
    flat: dict[str, Any] = {}
    for key, value in content.items():
        inner = {key: value}
        if isinstance(value, dict) and key in TABLES:
            inner = {f"{key}_{k}": v for k, v in value.items()}
        elif isinstance(value, dict) and key not in known_settings():
            raise ConfigError(
                f"the file {path} has an unknown table [{key}]: settings of a level are in "
                f"{', '.join(f'[{table}]' for table in TABLES)}, all others at the top level"
            )
        for name, given in inner.items():
            rest = name.removeprefix(f"{key}_")
            if rest in known_settings() and name not in known_settings():
                raise ConfigError(
                    f"{rest} is in the table [{key}] of the file {path}, and belongs to no level: "
                    "put it at the top of the file, above all tables"
                )
            if name in flat:
                table, _, rest = name.partition("_")
                raise ConfigError(
                    f"{name} is given twice in the file {path}: at the top level, and as {rest} in "
                    f"[{table}]"
                )
            flat[name] = _convert(name, given, f"the file {path}")
    return flat


def _convert(key: str, value: Any, source: str) -> Any:
    kind = known_settings().get(key)
    if kind is None:
        others = ARGUMENTS if source == GIVEN else map(str.lower, NOT_SETTINGS)
        candidates = [*known_settings(), *others]
        hint = question([repr(near) for near in near_names(key, candidates)])
        raise ConfigError(
            f"unknown setting {key!r} in {source}; {hint}docs/settings.md lists all settings, as "
            "does help('tierckpt.Settings') in Python"
        )
    if kind is str and isinstance(value, os.PathLike):
        value = os.fspath(value)
    if key == STORAGE_OPTIONS:
        return _storage_options(value, source)
    if value == AUTO and key in AUTOMATIC:
        return value
    try:
        if isinstance(value, str) and kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[value.lower()]
        if isinstance(value, str) and kind in (int, float):
            return kind(value)
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind:
            raise TypeError
    except (KeyError, TypeError, ValueError):
        either = " or auto" if key in AUTOMATIC else ""
        unit = next((u for u in UNITS if key.endswith(f"_{u}") or f"_{u}_" in key), "")
        must = f"it must be {KINDS[kind]}{f' of {unit}' if unit else ''}{either}"
        raise ConfigError(f"{key} in {source} is {value!r}; {must}") from None
    return value


def _storage_options(value: Any, source: str) -> str:
    """JSON from a mapping or from JSON. Errors do not repeat the value: it may be secret."""
    try:
        options = json.loads(value) if isinstance(value, str) and value else value or {}
        if isinstance(options, Mapping):
            return json.dumps(dict(options), sort_keys=True) if options else ""
    except (TypeError, ValueError):  # the errors' texts and tracebacks may show it
        pass
    raise ConfigError(
        f"{STORAGE_OPTIONS} in {source} must be a table of names and values that JSON can "
        "represent, or the same as a text in JSON, like "
        '{"endpoint_url": "https://...", "client_kwargs": {"region_name": "..."}}'
    )


def _build(flat: Mapping[str, Any]) -> Config:
    inner: dict[str, dict[str, Any]] = {table: {} for table in TABLES}
    outer: dict[str, Any] = {"path": Config.path}
    for key, value in flat.items():
        table, _, name = key.partition("_")
        if table in inner:
            inner[table][name] = value
        else:
            outer[key] = value
    # From the start: the agent has another working directory, and a job may change its own.
    make_absolute(outer, inner["persistent"])
    return Config(**{name: kind(**inner[name]) for name, kind in TABLES.items()}, **outer)


__all__ = ["ARGUMENTS", "NOT_SETTINGS", "PREFIX", "load_config"]
