"""Checks: every value, and settings that do not go together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierckpt._text import is_url
from tierckpt.errors import ConfigError

from .halt_texts import parse_notices, parse_signals
from .level_tables import STORAGE_OPTIONS
from .limits import DAY_SECONDS, YEAR_SECONDS, at_least, one_of, within
from .places import check_places

if TYPE_CHECKING:
    from .config import Config


def check(config: Config) -> None:
    """Raise ConfigError for the first setting that is wrong, or does not go with others."""
    at_least("rollback_to", config.rollback_to, 0)
    one_of("when_busy", config.when_busy, ("skip", "wait"))
    one_of("on_drift", config.on_drift, ("warn", "stop"))
    one_of("data_witness", config.data_witness, ("error", "warn", "off"))
    at_least("replica_check_steps", config.replica_check_steps, 0)
    one_of("release", config.release, ("auto", "backward", "forward"))
    one_of("agent", config.agent, ("process", "inline"))
    within("agent_nice", config.agent_nice, -20, 19)
    within("agent_linger_seconds", config.agent_linger_seconds, 0, YEAR_SECONDS)
    one_of("boundary", config.boundary, ("explicit", "forward"))
    parse_signals(config.halt_signals)
    parse_notices(config.halt_notices)
    within("halt_patience_seconds", config.halt_patience_seconds, 0, YEAR_SECONDS)
    within("halt_grace_seconds", config.halt_grace_seconds, 0, YEAR_SECONDS)
    within("halt_seconds_left", config.halt_seconds_left, 0, YEAR_SECONDS)
    within("halt_exit_status", config.halt_exit_status, 0, 255)
    within("incomplete_exit_status", config.incomplete_exit_status, 0, 255)
    one_of("health", config.health, ("off", "warn", "refuse"))
    within("health_seconds", config.health_seconds, 0.1, DAY_SECONDS)
    if config.slots:
        at_least("slots", config.slots, 2)
    at_least("heartbeat_seconds", config.heartbeat_seconds, 0)
    at_least("trace_steps", config.trace_steps, 1)
    if not 1e-4 <= config.overhead_budget < 1:  # NaN is not
        raise ConfigError(
            f"overhead_budget is {config.overhead_budget}; it must be a share of the training "
            "time, 0.0001 or more and below 1 (0.03 is 3 %)"
        )
    at_least("mean_failure_seconds", config.mean_failure_seconds, 0)
    one_of("best", config.best, ("lowest", "highest"))
    at_least("local_keep_last", config.local.keep_last, 1)
    for name in ("memory_every_steps", "memory_every_seconds", "memory_linger_seconds"):
        at_least(name, getattr(config.memory, name.removeprefix("memory_")), 0)
    for name in ("every_steps", "every_seconds", "keep_every", "keep_best"):
        at_least(f"local_{name}", getattr(config.local, name), 0)
    at_least("local_journal_steps", config.local.journal_steps, 0)
    at_least("peer_group_size", config.peer.group_size, 2)
    within("peer_port", config.peer.port, 0, 65535)
    persistent = config.persistent
    at_least("persistent_keep_last", persistent.keep_last, 1)
    at_least("persistent_shards_per_file", persistent.shards_per_file, 1)
    for name in ("every_steps", "every_seconds", "keep_every", "keep_best"):
        at_least(f"persistent_{name}", getattr(persistent, name), 0)
    for name in ("bytes_per_second", "nodes_at_once"):
        at_least(f"persistent_{name}", getattr(persistent, name), 0)
    _check_protected(config)
    _check_codecs(config)
    _check_exporters(config)
    check_places(config)
    _check_storage_options(config)


def _check_protected(config: Config) -> None:
    from tierckpt.erasure.groups import Scheme

    try:
        Scheme.parse(config.peer.redundancy)
    except ConfigError as error:
        raise ConfigError(f"peer_redundancy: {error}") from None
    if config.peer.on and not config.uses("local"):
        raise ConfigError(
            f"peer_redundancy is {config.peer.redundancy!r}, but no version goes to the local "
            "level, which it protects: set local_every_steps or local_every_seconds, or set "
            "peer_redundancy to none"
        )


def _check_codecs(config: Config) -> None:
    """Report missing packages and keys at the start, not at the first commit."""
    if not (config.local.codecs or config.persistent.codecs):
        return
    from tierckpt.codecs.pipeline import Pipeline

    local = Pipeline.of_setting(config.local.codecs, "local_codecs")
    persistent = Pipeline.of_setting(config.persistent.codecs, "persistent_codecs")
    if local.delta:
        raise ConfigError(
            f"local_codecs is {config.local.codecs!r}: delta is for versions that the persistent "
            "level keeps for a long time (persistent_codecs); local_codecs takes incremental"
        )
    if persistent.delta and config.persistent.path and not config.persistent.keep_every:
        raise ConfigError(
            f"persistent_codecs is {config.persistent.codecs!r}, but delta stores only versions "
            "that persistent_keep_every keeps, and that is 0: set it, or leave out delta"
        )
    if local.hides and config.local.journal_steps:
        raise ConfigError(
            f"local_codecs is {config.local.codecs!r}, and local_journal_steps is "
            f"{config.local.journal_steps}: the journal is not encrypted, so the disk would have "
            "the gradients in the clear. Drop one of the two"
        )
    if local.hides and config.uses("peer"):
        raise ConfigError(
            f"local_codecs is {config.local.codecs!r}, and peer_redundancy is "
            f"{config.peer.redundancy!r}: parity is made of unencrypted shards, so other nodes' "
            "disks would have in the clear what this one encrypts. Encrypt on the persistent "
            "level (persistent_codecs), or drop one of the two"
        )


def _check_exporters(config: Config) -> None:
    """Report missing packages and wrong arguments at the start."""
    if config.export:
        from tierckpt.exporters.setting import exporters_of

        exporters_of(config.export)


def _check_storage_options(config: Config) -> None:
    """Check the options of a directory; a store's client checks its own. They may be secret."""
    if not config.persistent.storage_options or is_url(config.persistent.path):
        return
    options = config.persistent.options()
    for name in ("direct", "shared_writes"):
        if not isinstance(options.get(name, False), bool):
            raise ConfigError(f"{name} in {STORAGE_OPTIONS} must be true or false")


__all__ = ["check"]
