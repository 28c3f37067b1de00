"""The keyword arguments of a Checkpointer, typed: an editor completes and checks them.

`Config` has the meaning, the default and the checks of each setting.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

from .callbacks import Callbacks
from .config import Steps
from .events import Callback

AnyPath = str | os.PathLike[str]


class Settings(TypedDict, total=False):
    """Every setting of `Config` by its flat name."""

    path: AnyPath
    job_id: str
    shm_dir: AnyPath
    slots: int
    rollback_to: int
    fork_from: AnyPath
    when_busy: str
    release: str
    boundary: str
    forward_changes: str
    node: str
    agent: str
    agent_nice: int
    agent_linger_seconds: float
    replica_check_steps: int
    on_drift: str
    halt_signals: str
    halt_notices: str
    halt_patience_seconds: float
    halt_seconds_left: float
    halt_grace_seconds: float
    halt_exit_status: int
    health: str
    health_seconds: float
    events_dir: AnyPath
    run_records: bool
    heartbeat_seconds: float
    export: str
    trace_dir: AnyPath
    trace_steps: int
    best: str
    overhead_budget: float
    mean_failure_seconds: float
    memory_every_steps: Steps
    memory_every_seconds: float
    memory_linger_seconds: float
    local_every_steps: Steps
    local_every_seconds: float
    local_keep_last: int
    local_keep_every: int
    local_keep_best: int
    local_in_place: bool
    local_journal_steps: int
    local_journal_copy: bool
    local_codecs: str
    peer_redundancy: str
    peer_group_size: int
    peer_domain: str
    peer_interface: str
    peer_port: int
    persistent_path: AnyPath
    persistent_every_steps: Steps
    persistent_every_seconds: float
    persistent_keep_last: int
    persistent_keep_every: int
    persistent_keep_best: int
    persistent_bytes_per_second: float
    persistent_nodes_at_once: int
    persistent_shards_per_file: int
    persistent_read_back: bool
    persistent_drop_superseded: bool
    persistent_codecs: str
    persistent_storage_options: str | Mapping[str, Any]


class Arguments(Settings, total=False):
    """Settings, and the other keyword arguments of `tierckpt.Checkpointer` for adapters."""

    extra: Mapping[str, Any] | None
    extra_per_rank: Mapping[str, Any] | None
    on_event: Callback | None
    callbacks: Iterable[Callbacks]
    config_file: AnyPath | None


__all__ = ["Arguments", "Settings"]
