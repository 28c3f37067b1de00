"""Settings of SCR by their names, and the settings of Tierckpt that follow from them. Pure.

The names and their meaning are those of SCR's user guide, "Configure a job". A name that would
change where or how data is stored, and has no counterpart here, is refused in words; names about
SCR's own commands, logs and buffers have no effect, and a notice says so.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from string import Template
from typing import Any

from tierckpt._text import near_names, question
from tierckpt.core.retention import KEEP_ALL
from tierckpt.errors import ConfigError

SCHEMES = ("SINGLE", "PARTNER", "XOR", "RS")
KNOWN = {
    "SCR_PREFIX": "",
    "SCR_CACHE_BASE": "/dev/shm",
    "SCR_CACHE_SIZE": "1",
    "SCR_COPY_TYPE": "XOR",
    "SCR_SET_SIZE": "8",
    "SCR_SET_FAILURES": "2",
    "SCR_FLUSH": "10",
    "SCR_PREFIX_SIZE": "0",
    "SCR_CHECKPOINT_INTERVAL": "0",
    "SCR_CHECKPOINT_SECONDS": "0",
    "SCR_CHECKPOINT_OVERHEAD": "0",
    "SCR_HALT_SECONDS": "0",
    "SCR_CURRENT": "",
}
"""Settings with an effect, and SCR's defaults."""
NO_EFFECT = {
    f"SCR_{name}"
    for name in (
        *("ENABLE", "GLOBAL_RESTART", "FETCH", "FETCH_WIDTH", "FETCH_BYPASS", "DISTRIBUTE"),
        *("CACHE_PURGE", "CACHE_BYPASS", "PREFIX_PURGE", "PRESERVE_DIRECTORIES", "USE_CONTAINERS"),
        *("HALT_EXIT", "HALT_ENABLED", "GROUP", "HOP_DISTANCE", "CONTAINER_SIZE"),
        *("FLUSH_ON_RESTART", "FLUSH_WIDTH", "FLUSH_TYPE", "FLUSH_POSTSTAGE", "FLUSH_ASYNC"),
        *("FLUSH_ASYNC_BW", "FLUSH_ASYNC_PERCENT", "FLUSH_ASYNC_USLEEP"),
        *("CRC_ON_COPY", "CRC_ON_DELETE", "CRC_ON_FLUSH", "MPI_BUF_SIZE", "FILE_BUF_SIZE"),
        *("DEBUG", "LOG_ENABLE", "LOG_TXT_ENABLE", "LOG_SYSLOG_ENABLE", "LOG_SYSLOG_PREFIX"),
        *("LOG_SYSLOG_FACILITY", "LOG_SYSLOG_LEVEL", "LOG_DB_ENABLE", "LOG_DB_DEBUG"),
        *("LOG_DB_HOST", "LOG_DB_NAME", "LOG_DB_USER", "LOG_DB_PASS"),
        *("RUNS", "MIN_NODES", "EXCLUDE_NODES", "WATCHDOG", "WATCHDOG_TIMEOUT"),
        *("WATCHDOG_TIMEOUT_PFS", "CNTL_BASE", "JOB_ID", "JOB_NAME", "USER_NAME", "CLUSTER_NAME"),
    )
}
"""SCR's other settings. Some of their values are refused."""
OF_THE_FILE = "SCR_CONF_FILE"
"""The variable with the name of the user's file."""
AFRESH = "to start without the checkpoints of earlier runs, give another SCR_PREFIX"
REFUSED = {
    ("SCR_ENABLE", "0"): "leave out the calls of scr instead",
    ("SCR_GLOBAL_RESTART", "1"): "open the paths that route_file() returns: each rank finds its "
    "own files on its node",
    ("SCR_FETCH", "0"): AFRESH,
    ("SCR_CACHE_PURGE", "1"): AFRESH,
    ("SCR_PREFIX_PURGE", "1"): AFRESH,
    ("SCR_HALT_EXIT", "1"): "leave the loop when should_exit() is true, and call finalize()",
    ("SCR_FLUSH_ON_RESTART", "1"): "restart with have_restart(), which needs no flush first",
    ("SCR_COPY_TYPE", "FILE"): f"give one of {', '.join(SCHEMES)}",
}
"""Values without a counterpart, each with the remedy."""


@dataclass(frozen=True)
class ScrSettings:
    """The settings of one run."""

    prefix: str
    """Directory of the files' own paths."""
    interval: int
    seconds: float
    overhead: float
    """Largest share of the time that checkpoints take, in percent; 0: no limit is set."""
    current: str
    """Name of the checkpoint to restart from; empty: the newest."""
    of_files: dict[str, Any]
    """Settings of `Files`."""
    notices: tuple[str, ...] = ()
    """What of the settings this job cannot have, in words."""

    @property
    def advises(self) -> bool:
        """True if `need_checkpoint` can ever be true by itself."""
        return bool(self.interval or self.seconds or self.overhead)


def merged(
    given: Mapping[str, str], in_file: Mapping[str, str], environment: Mapping[str, str]
) -> dict[str, str]:
    """All settings by name: variables win over the user's file, and that over `config()`, as in
    SCR."""
    own = {name: value for name, value in environment.items() if name.startswith("SCR_") and value}
    return {**KNOWN, **given, **in_file, **own}


def of_file(text: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The settings in a user's configuration file. Lines of descriptors (`CKPT=0 TYPE=XOR`) have no
    effect, as in SCR without SCR_COPY_TYPE=FILE."""
    found = {}
    for line in text.splitlines():
        name, is_set, value = line.partition("#")[0].partition("=")
        if is_set and name.strip().startswith("SCR_"):
            found[name.strip()] = Template(value.strip().strip('"')).safe_substitute(environment)
    return found


def scr_settings(found: Mapping[str, str], nodes: int) -> ScrSettings:
    """What follows from all settings (`merged`) for a job of that many nodes. Raises
    ConfigError."""
    for (name, value), remedy in REFUSED.items():
        if found.get(name, "").strip().upper() == value:
            raise ConfigError(f"{name}={value} is not supported by tierckpt.scr: {remedy}")
    number = {name: _number(name, found[name]) for name in KNOWN if KNOWN[name].isdigit()}
    prefix = os.path.realpath(found["SCR_PREFIX"] or os.getcwd())
    flush = int(number["SCR_FLUSH"])
    base = os.path.abspath(found["SCR_CACHE_BASE"])
    job = hashlib.sha256(os.fsencode(prefix)).hexdigest()[:12]
    of_files: dict[str, Any] = {
        "path": os.path.join(base, f"tierckpt-scr-{os.getuid()}", job),
        "job_id": f"scr-{job}",
        "local_every_steps": 1,
        "local_every_seconds": 0.0,
        "local_keep_last": max(int(number["SCR_CACHE_SIZE"]), 1),
        **_redundancy(found["SCR_COPY_TYPE"], number, nodes),
        "halt_seconds_left": number["SCR_HALT_SECONDS"],
    }
    of_files |= {
        "persistent_path": os.path.join(prefix, ".tierckpt"),
        "persistent_every_steps": flush,
        "persistent_every_seconds": 0.0 if flush else 1e8,
        "persistent_keep_last": int(number["SCR_PREFIX_SIZE"]) or KEEP_ALL,
    }
    return ScrSettings(
        prefix,
        int(number["SCR_CHECKPOINT_INTERVAL"]),
        number["SCR_CHECKPOINT_SECONDS"],
        number["SCR_CHECKPOINT_OVERHEAD"],
        found["SCR_CURRENT"],
        of_files,
        tuple(_without_effect(found, _too_few(found["SCR_COPY_TYPE"], number, nodes))),
    )


def _without_effect(found: Mapping[str, str], too_few: str) -> Iterator[str]:
    """Sentences about the settings that this job cannot have."""
    if too_few:
        yield too_few
    known = {*KNOWN, *NO_EFFECT, OF_THE_FILE}
    for name in sorted(found.keys() - known):
        hint = question(near_names(name, sorted(known), cutoff=0.75))
        yield "; ".join(
            filter(None, [f"{name} is no setting of SCR, and has no effect", hint.strip()])
        )
    if without := sorted(found.keys() & NO_EFFECT):
        verb = "have" if without[1:] else "has"
        yield f"{', '.join(without)} {verb} no effect in tierckpt.scr (docs/files.md)"


def _redundancy(scheme: str, number: Mapping[str, float], nodes: int) -> dict[str, Any]:
    """Settings of the peer level. As in SCR, sets are as large as the job's nodes allow."""
    scheme = scheme.strip().upper()
    if scheme not in SCHEMES:
        raise ConfigError(f"SCR_COPY_TYPE is {scheme!r}; valid: {', '.join(SCHEMES)}")
    size = min(max(int(number["SCR_SET_SIZE"]), 2), nodes)
    failures = int(number["SCR_SET_FAILURES"])
    if scheme == "SINGLE" or _too_few(scheme, number, nodes):
        return {"peer_redundancy": "none"}
    if scheme == "RS":
        return {"peer_redundancy": f"rs {size - failures}+{failures}", "peer_group_size": size}
    return {"peer_redundancy": scheme.lower(), "peer_group_size": size}


def _too_few(scheme: str, number: Mapping[str, float], nodes: int) -> str:
    """The reason why the job has no redundancy between nodes, though it asks for it."""
    scheme = scheme.strip().upper()
    size = min(max(int(number["SCR_SET_SIZE"]), 2), nodes)
    needs = int(number["SCR_SET_FAILURES"]) + 1 if scheme == "RS" else 2
    if scheme == "SINGLE" or size >= needs:
        return ""
    return (
        f"SCR_COPY_TYPE={scheme} needs sets of {needs} nodes or more, and sets have {size} here: "
        "a checkpoint is lost with its node, unless it is in SCR_PREFIX. SCR_COPY_TYPE=SINGLE says "
        "that this is meant"
    )


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise ConfigError(f"{name} is {text!r}; it must be a number, 0 or more")
    return value


__all__ = ["ScrSettings", "merged", "of_file", "scr_settings"]
