"""The keyword arguments of a Checkpointer, typed: an editor completes, checks and explains them.

`Config` declares and checks the settings; `tools/make_settings.py` writes `Settings` from there.
"""

from __future__ import annotations

import ast
import functools
import inspect
import os
import textwrap
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar

from .callbacks import Callbacks
from .events import Callback

Taker = TypeVar("Taker")


class Settings(TypedDict, total=False):
    """Every setting of `Config` by its flat name."""

    path: str | os.PathLike[str]
    """Directory of the local level, and, unless `job_id` says otherwise, the job's identity.
    Default: `"ckpts"`."""
    job_id: str
    """Identity of the job: a job with the same id takes over versions in memory; empty: made from
    `path`. Jobs with different ids need different paths, too. Default: `""`."""
    shm_dir: str | os.PathLike[str]
    """Memory file system for the slots. Default: `"/dev/shm"`."""
    slots: int
    """Slots per rank; 0: two, or three with a GPU, and for versions of up to 4 MiB a rank. Two are
    always safe; with a third, a version can be taken to memory while another one is still being
    written to disk or drained, and a small one is copied at its boundary. Default: `0`."""
    rollback_to: int
    """Go back to this version at the next restore, once: later restarts take the newest version
    since then (see `tierckpt rollback`). 0: take the newest version. Default: `0`."""
    fork_from: str | os.PathLike[str]
    """If this job has no version of its own, start from a version of another job: its path, or
    `PATH@v4000` (see `Checkpointer.restore`). Later starts take this job's own versions, so the
    setting may stay. Default: `""`."""
    when_busy: str
    """If a checkpoint is due and no slot is free: `skip` it, or `wait` for one. If a persistent
    level is slow: keep the newest waiting version, or `wait` for the level. Default: `"skip"`."""
    release: str
    """Start of the copying: `backward` (with each layer's allreduce), `forward` (at once), or
    `auto`: backward, until the barrier has to wait for it; up to 4 MiB a rank, all at the boundary.
    Default: `"auto"`."""
    boundary: str
    """`explicit`: only a call of `step()` is the boundary; `forward`: the next forward pass in
    training mode after an optimizer step is. `restore()` returns calls, or steps. Default:
    `"explicit"`."""
    forward_changes: str
    """Parameters that the forward pass changes in place (it normalises its weights), by name,
    separated by commas; `*` stands for any part of a name. They are copied at the boundary, whole
    on each rank, as buffers are. Name also parameters that differ between ranks by design. Default:
    `""`."""
    node: str
    """Name of this node, if the host name is not unique (several nodes on one machine, in tests).
    `{node}` in `path` stands for it. Default: `""`."""
    agent: str
    """`process`: one per node, which outlives its trainers; `inline`: a thread of each trainer, for
    debugging and for environments without child processes. Default: `"process"`."""
    agent_linger_seconds: float
    """Time that an agent waits for a new trainer after its own was killed, before it ends. Default:
    `60.0`."""
    replicas: str
    """Compare parameters and optimizer state between ranks: one slice at each boundary, everything
    once in 50 boundaries, or as many as you say: `warn every 100`. If replicas differ, `warn` with
    an event, and mark versions as suspect; or `stop`, with a ReplicaError on all ranks. `off`: do
    not compare. Default: `"warn"`."""
    data_witness: str
    """If a resumed loader gives another newest batch than before the restart: `error`, a
    RestoreError on all ranks before the first step; `warn`, with an event; `off`: do not compare.
    Default: `"error"`."""
    halt_signals: str
    """Signals that cause a last checkpoint and the end; empty: none. Default:
    `"SIGTERM,SIGUSR1"`."""
    halt_notices: str
    """Cloud with notices that it takes this machine away, which cause a last checkpoint and the
    end: `aws`, `gcp` or `azure`, perhaps with the address of its metadata service, `aws
    http://127.0.0.1:1338`; empty: no notices. Default: `""`."""
    halt_seconds_left: float
    """Take a last checkpoint and end this long before the end of the scheduler's allocation, if the
    environment has it (SLURM_JOB_END_TIME), and this long before the time of a `tierckpt halt
    --before` without `--seconds-left`. 0: ignore the end of the allocation, and end only after that
    time. Default: `0.0`."""
    halt_grace_seconds: float
    """Time from a signal until the sender kills the remaining processes: torchrun, Slurm (KillWait)
    and Kubernetes all grant 30 s. If the end of the allocation is unknown, the end of the job waits
    for other nodes and the persistent level until 10 s before that. A process that received
    SIGTERM, and passes no boundary for a third of this time (and for twice its longest iteration),
    ends without a last checkpoint: others may be gone, and it would hang until it is killed.
    Default: `30.0`."""
    requeue_exit_status: int
    """Exit status of a script that ends though its work is not finished or not safe, so that a
    scheduler starts it again: it never calls `should_exit()`, and its processes, its node or its
    allocation end; or its training has finished, and its last version is missing on a level, which
    an error reports. A `tierckpt halt` always ends a script with 0. A status other than 0 ends the
    process by a SystemExit: from `close()`, or in Lightning and Transformers where `fit()` or
    `train()` would return. Default: `0`."""
    stages: str
    """Work of the node's agent on each version that is complete on all local disks, separated by
    commas: `mirror DIRECTORY`, a copy of the shards on a second disk of the node, where a restart
    looks, too; or a stage of yours (see `tierckpt.stages`). `{node}` stands for the node. Default:
    `""`."""
    events_dir: str | os.PathLike[str]
    """Write events to `<events_dir>/events-r<rank>.jsonl`, and for `tierckpt goodput` the progress
    of the training; empty: no file. Default: `""`."""
    export: str
    """Exporters of metrics, separated by commas: `prometheus 9400` (on this machine alone),
    `prometheus *:9400` (also to others), `prometheus FILE.prom`, `opentelemetry URL`, `tensorboard
    FOLDER`, `wandb`, `mlflow` (see `tierckpt.exporters`); empty: none. Default: `""`."""
    trace_dir: str | os.PathLike[str]
    """Write a timeline of the first 50 steps to `<trace_dir>/trace-r<rank>.json`; empty: no file,
    and no cost. Default: `""`."""
    overhead_budget: float
    """Limit of the share of training time that checkpoints on `auto` intervals take. An interval in
    seconds applies all the same. Default: `0.03`."""
    memory_every_steps: int | Literal["auto"]
    """Take a version to memory every N optimizer steps; 0: not by steps; `auto`: as often as
    `overhead_budget` allows. Default: `1`."""
    memory_every_seconds: float
    """Take one also after this time; 0: not by time. Default: `0.0`."""
    local_every_steps: int | Literal["auto"]
    """Take a version to the local level every N optimizer steps; 0: not by steps; `auto`: as often
    as `overhead_budget` allows. Default: `0`."""
    local_every_seconds: float
    """Take one also after this time, which bounds the loss, however long a step is; 0: not by time.
    Default: `60.0`."""
    local_keep: str | int
    """Versions to keep: the number of newest complete ones; perhaps also one every so many steps
    (each multiple, or the next version if a multiple was not taken), and a number of best ones, by
    the metric given at boundaries: `2, every 1000, best 3`. Of a metric that shall grow, an
    accuracy: `best 3 highest`. Default: `"2"`."""
    local_journal_steps: int
    """Keep a journal of the gradients of every optimizer step, so that a restart makes the steps
    after the newest version again; and take a version at the latest after N steps, which limits the
    journal's room and the time of a restart. 0: no journal. With `peer_redundancy` another node has
    a copy of each rank's journal, so that it survives the loss of a node. Default: `0`."""
    local_codecs: str
    """Codecs applied to shards on the way to the level, in this order: `incremental`, `zstd
    level=1`, `aes-gcm`, or a codec of yours (see `tierckpt.codecs`); empty: none. Default: `""`."""
    peer_redundancy: str
    """`none`; `partner` or `partner <copies>`; `xor`, which survives one loss in a group; `rs
    <k>+<m>`, which survives m. A group has 8 members, those of `rs` k + m; `xor of 4` and `partner
    of 4` have groups of 4. Default: `"none"`."""
    peer_domain: str
    """Name of the failure domain (a rack, a switch); empty: the node. Default: `""`."""
    peer_interface: str
    """Network interface or address that the agents use, and votes between nodes, perhaps with the
    TCP port of the node's agent: `ib0`, `10.0.0.5:29400`, `[fd00::5]:29400`, `:29400`. Without one:
    that which reaches the other nodes, and any port. Default: `""`."""
    persistent_path: str | os.PathLike[str]
    """A directory that all nodes see, or a URL (s3://bucket/prefix); empty: no such level. Default:
    `""`."""
    persistent_every_steps: int | Literal["auto"]
    """Take a version to this level every N optimizer steps; 0: not by steps; `auto`: as for memory,
    with at most half of the time spent on flushing. Default: `0`."""
    persistent_every_seconds: float
    """Take one also after this time; 0: not by time. Default: `600.0`."""
    persistent_keep: str | int
    """Versions to keep, as `local_keep`. Default: `"2"`."""
    persistent_bytes_per_second: float
    """Limit of each node's rate; 0: no limit. Default: `0.0`."""
    persistent_codecs: str
    """Codecs of this level, as `local_codecs`, which are undone first; empty: none. Default:
    `""`."""
    persistent_storage_options: str | Mapping[str, Any]
    """Options for the store's client besides the path: endpoint, keys, region. A directory takes
    `direct` and `shared_writes`. Given as a table (a mapping) or as JSON; kept as JSON. The options
    may be secret: they are shown nowhere, and the agent gets them over its private socket. Default:
    `""`."""


class Arguments(Settings, total=False):
    """Settings, and the other keyword arguments of `tierckpt.Checkpointer` for adapters."""

    extra: Mapping[str, Any] | None
    extra_per_rank: Mapping[str, Any] | None
    on_event: Callback | None
    callbacks: Iterable[Callbacks]
    config_file: str | os.PathLike[str] | None


def with_settings(taker: Taker) -> Taker:
    """Decorate a class or function that takes `Settings`: `help()` of it explains each of them."""
    taker.__doc__ = f"{inspect.cleandoc(taker.__doc__ or '')}\n\n{SETTINGS}\n{_described()}"
    return taker


SETTINGS = "Settings:"
"""The line in docstrings from which on `with_settings` lists them."""


@functools.cache
def _described() -> str:
    """Each setting with its type, meaning and default, from the text of this module, which Python
    drops."""
    try:
        tree = ast.parse(Path(__file__).read_text())
    except OSError:  # installed without sources
        return f"{INDENT}see docs/settings.md"
    found = next(node for node in tree.body if isinstance(node, ast.ClassDef))
    lines = list[str]()
    for each, after in pairwise(found.body):
        if isinstance(each, ast.AnnAssign) and isinstance(after, ast.Expr):
            text = " ".join(ast.literal_eval(after.value).split())
            lines.append(f"{INDENT}{ast.unparse(each.target)}: {ast.unparse(each.annotation)}")
            lines += textwrap.wrap(
                text, WIDTH, initial_indent=2 * INDENT, subsequent_indent=2 * INDENT
            )
    return "\n".join(lines)


INDENT, WIDTH = "    ", 96

__all__ = ["SETTINGS", "Arguments", "Settings", "with_settings"]
