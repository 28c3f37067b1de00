"""Config: all settings of a job, with their defaults."""

from __future__ import annotations

import functools
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_type_hints

from .checks import check
from .level_tables import TABLES, LocalConfig, MemoryConfig, PeerConfig, PersistentConfig, Steps


@dataclass(frozen=True)
class Config:
    """All settings. Frozen: they do not change during a job."""

    path: str = "ckpts"
    """Directory of the local level, and, unless `job_id` says otherwise, the job's identity."""
    job_id: str = ""
    """Identity of the job: a job with the same id takes over versions in memory; empty: made from
    `path`. Jobs with different ids need different paths, too."""
    shm_dir: str = "/dev/shm"
    """Memory file system for the slots."""
    slots: int = 0
    """Slots per rank; 0: two, or three with a GPU. Two are always safe; with a third, a version can
    be taken to memory while another one is still being written to disk or drained."""
    rollback_to: int = 0
    """Go back to this version at the next restore, once: later restarts take the newest version
    since then (see `tierckpt rollback`). 0: take the newest version."""
    fork_from: str = ""
    """If this job has no version of its own, begin from a version of another job: its path, or
    `PATH@v4000` (see `Checkpointer.restore`). Later starts take this job's own versions, so the
    setting may stay."""
    when_busy: str = "skip"
    """If a checkpoint is due and no slot is free: `skip` it, or `wait` for one. If a persistent
    level is slow: keep the newest waiting version, or `wait` for the level."""
    release: str = "auto"
    """Start of the copying: `backward` (with each layer's allreduce), `forward` (at once), or
    `auto`: backward, until the barrier has to wait for it."""
    boundary: str = "explicit"
    """`explicit`: only a call of `step()` is the boundary; `forward`: the next forward pass in
    training mode after an optimizer step is. `restore()` returns calls, or steps."""
    forward_changes: str = ""
    """Parameters that the forward pass changes in place (it normalises its weights), by name,
    separated by commas; `*` stands for any part of a name. They are copied at the boundary, whole
    on each rank, as buffers are. Name also parameters that differ between ranks by design."""
    node: str = ""
    """Name of this node, if the host name is not unique (several nodes on one machine, in tests).
    `{node}` in `path` stands for it."""
    agent: str = "process"
    """`process`: one per node, which outlives its trainers; `inline`: a thread of each trainer, for
    debugging and for environments without child processes."""
    agent_nice: int = 10
    """CPU niceness of the agent, relative to its trainers."""
    agent_linger_seconds: float = 60.0
    """Time that an agent waits for a new trainer after its own was killed, before it ends."""
    replica_check_steps: int = 50
    """Compare parameters and optimizer state between ranks: one slice at each boundary, everything
    once in N boundaries; 0: do not."""
    on_drift: str = "warn"
    """If replicas differ: `warn` with an event, and mark versions as suspect; or `stop`, with a
    ReplicaError on all ranks."""
    data_witness: str = "error"
    """If a resumed loader gives another newest batch than before the restart: `error`, a
    RestoreError on all ranks before the first step; `warn`, with an event; `off`: do not
    compare."""
    halt_signals: str = "SIGTERM,SIGUSR1"
    """Signals that cause a last checkpoint and the end; empty: none."""
    halt_notices: str = ""
    """Cloud whose notices that it takes this machine away cause a last checkpoint and the end:
    `aws`, `gcp` or `azure`, perhaps with the address of its metadata service, `aws
    http://127.0.0.1:1338`; empty: no notices."""
    halt_patience_seconds: float = 10.0
    """A process that received SIGTERM, and passes no boundary for this time (and for twice its
    longest iteration), ends without a last checkpoint: others may be gone, and it would hang until
    the launcher kills it. Increase it if an evaluation between two boundaries takes longer."""
    halt_seconds_left: float = 0.0
    """Take a last checkpoint and end this long before the end of the scheduler's allocation, if the
    environment has it (SLURM_JOB_END_TIME), and this long before the time of a `tierckpt halt
    --before` without `--seconds-left`. 0: ignore the end of the allocation, and end only after that
    time."""
    halt_grace_seconds: float = 30.0
    """Time from a signal until the sender kills the remaining processes: torchrun, Slurm (KillWait)
    and Kubernetes all grant 30 s. If the end of the allocation is unknown, the end of the job waits
    for other nodes and the persistent level until 10 s before that."""
    halt_exit_status: int = 0
    """Exit status of a script that never calls `should_exit()` and is ended because its processes,
    its node or its allocation end. Some schedulers start a job again only after another status than
    0. A `tierckpt halt` always ends such a script with 0. In Lightning and Transformers a status
    other than 0 ends the process in place of `fit()` or `train()` returning; else they return."""
    incomplete_exit_status: int = 0
    """If the last version of a training that has finished is missing on a level: end the process
    with this status, by a SystemExit from `close()`, or where `fit()` or `train()` would return. 0:
    an error reports it, and the script goes on."""
    health: str = "off"
    """Check every node's directories and memory at the start: `off`; `warn` names nodes that are
    not well; `refuse` also ends the start."""
    health_seconds: float = 20.0
    """A directory that does not answer within this time is not well. A start goes on without such a
    persistent level, and without such places for events and traces."""
    events_dir: str = ""
    """Write events to `<events_dir>/events-r<rank>.jsonl`; empty: no file."""
    run_records: bool = True
    """Note each run beside its versions, for `tierckpt log`: host and user, launcher, hash of the
    command line, git commit, versions of the software, and how it ended. No arguments, no
    environment, no error's text."""
    heartbeat_seconds: float = 5.0
    """Write the progress of the training to `events_dir` this often, for `tierckpt goodput`; 0: at
    every boundary."""
    export: str = ""
    """Exporters of metrics, separated by commas: `prometheus 9400` (on this machine alone),
    `prometheus *:9400` (also to others), `prometheus FILE.prom`, `opentelemetry URL`, `tensorboard
    FOLDER`, `wandb`, `mlflow` (see `tierckpt.exporters`); empty: none."""
    trace_dir: str = ""
    """Write a timeline to `<trace_dir>/trace-r<rank>.json`; empty: no file, and no cost."""
    trace_steps: int = 50
    """Number of steps of every run in the timeline: a few are enough, and the files of a thousand
    ranks stay small."""
    best: str = "lowest"
    """The best metric, for `local_keep_best` and `persistent_keep_best`: the `lowest` (a loss), or
    the `highest` (an accuracy)."""
    overhead_budget: float = 0.03
    """Limit of the share of training time that checkpoints on `auto` intervals take. An interval in
    seconds applies all the same."""
    mean_failure_seconds: float = 0.0
    """Mean time between failures of the job: `auto` intervals are then no shorter than the optimum
    (see `tierckpt interval`); 0: unknown, and the whole budget is used."""
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    local: LocalConfig = field(default_factory=LocalConfig)
    peer: PeerConfig = field(default_factory=PeerConfig)
    persistent: PersistentConfig = field(default_factory=PersistentConfig)

    def __post_init__(self) -> None:
        """Check the values. Raises ConfigError."""
        check(self)

    @property
    def directory(self) -> str:
        """`path` on this node."""
        return self.path.replace("{node}", self.here)

    @property
    def here(self) -> str:
        """The name of this node, for `{node}` in `path`."""
        return self.node or socket.gethostname()

    @property
    def idle(self) -> list[str]:
        """Settings of the persistent level that have no effect, as `persistent_path` is not set."""
        if self.persistent.path:
            return []
        there = fields(PersistentConfig)
        given = [f.name for f in there if getattr(self.persistent, f.name) != f.default]
        return [f"persistent_{name}" for name in given]

    def uses(self, level: str) -> bool:
        """True if versions go to this level. Versions for the persistent level go to local
        first."""
        if level == "local" and self.uses("persistent"):
            return True
        if level == "peer":
            return self.peer.on and self.uses("local")
        table = getattr(self, level)
        if level == "local" and self.local.journal_steps:
            return True
        there = level != "persistent" or bool(self.persistent.path)
        return there and (table.every_steps != 0 or table.every_seconds > 0)


@functools.cache
def known_settings() -> Mapping[str, type]:
    """Flat name -> type of every setting."""
    known: dict[str, type] = {}
    hints = get_type_hints(Config)
    for item in fields(Config):
        kind = hints[item.name]
        if kind in TABLES.values():
            inner = get_type_hints(kind)
            known.update({f"{item.name}_{f.name}": _plain(inner[f.name]) for f in fields(kind)})
        else:
            known[item.name] = kind
    return known


def _plain(kind: Any) -> type:
    """The type of a setting without the `auto` that some accept."""
    return int if kind == Steps else kind


__all__ = ["Config", "known_settings"]
