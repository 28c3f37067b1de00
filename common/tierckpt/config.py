"""Configuration: constructor arguments over `TIERCKPT_*` variables over a TOML file.

One flat name serves everywhere: `local_every_steps=10` as an argument,
`TIERCKPT_LOCAL_EVERY_STEPS=10` in the environment, and in the file either `local_every_steps = 10`
or `every_steps = 10` in a table `[local]`.

In this order: the settings of each level, in a frozen class with defaults; checks of one value,
with errors that name the setting and what it must be; the signals and notices that end a job;
paths, and names that are parts of paths; checks of every value, and of settings that do not go
together; `Config`, all settings of a job; the sources of values, and their types.
"""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self, get_type_hints
from urllib.parse import urlsplit

from msgspec import Struct, field
from msgspec.structs import asdict, replace

from tierckpt._text import directory_of, is_url, near_names, question, repr_without
from tierckpt.errors import ConfigError

__all__ = [
    "ARGUMENTS",
    "AUTO",
    "AUTOMATIC",
    "CLOUDS",
    "DAY_SECONDS",
    "DEFAULT_ID_BYTES",
    "FOLDERS",
    "KEEP",
    "NAME_BYTES",
    "NOT_SETTINGS",
    "PREFIX",
    "STORAGE_OPTIONS",
    "TABLES",
    "YEAR_SECONDS",
    "Config",
    "LocalConfig",
    "MemoryConfig",
    "PeerConfig",
    "PersistentConfig",
    "RetentionPolicy",
    "Steps",
    "at_least",
    "check",
    "check_places",
    "known_settings",
    "load_config",
    "make_absolute",
    "one_of",
    "parse_notices",
    "parse_replicas",
    "parse_signals",
    "within",
]


AUTO: Literal["auto"] = "auto"
"""Stands for a number of steps: as often as the overhead budget allows; see `core.tuning`."""
Steps = int | Literal["auto"]


class RetentionPolicy(Struct, frozen=True):
    """Rules that keep versions of a level; a version stays if one of the rules keeps it."""

    keep_last: int = 2
    """Number of newest versions to keep; at least one always stays."""
    keep_every: int = 0
    """Keep a version every so many steps, see `core.retention.milestones`; 0: none."""
    keep_best: int = 0
    """Number of best versions by metric to keep; 0: none. Of two equal metrics the newer version is
    better; versions without a metric are never best."""
    best_is_low: bool = True
    """True: a smaller metric is better. False: a larger one."""

    @classmethod
    @functools.cache
    def of_setting(cls, text: str, name: str) -> Self:
        """From `2, every 1000, best 3 highest`. Raises ConfigError that names the setting."""
        found: dict[str, str] = {}
        for part in text.split(","):
            rule = _KEEP_RULE.fullmatch(" ".join(part.split()))
            each = {k: v for k, v in rule.groupdict().items() if v} if rule else {}
            if not each or found.keys() & each.keys():
                raise ConfigError(
                    f"{name} is {text!r}; give the number of newest versions, and perhaps which "
                    'others: "2", "2, every 1000", "2, best 3", "2, best 3 highest"'
                )
            found |= each
        low = found.pop("which", "") != "highest"
        return cls(**{f"keep_{k}": int(v) for k, v in found.items()}, best_is_low=low)


_KEEP_RULE = re.compile(
    r"(?P<last>[1-9]\d*)|every (?P<every>[1-9]\d*)"
    r"|best (?P<best>[1-9]\d*)(?: (?P<which>lowest|highest))?"
)


class MemoryConfig(Struct, frozen=True):
    """The memory level: sealed slots, which survive a crashed process."""

    every_steps: Steps = 1
    """Take a version to memory every N optimizer steps; 0: not by steps; `auto`: as often as
    `overhead_budget` allows."""
    every_seconds: float = 0.0
    """Take one also after this time; 0: not by time."""


class LocalConfig(Struct, frozen=True):
    """The local level: shard files on a node-local file system."""

    every_steps: Steps = 0
    """Take a version to the local level every N optimizer steps; 0: not by steps; `auto`: as often
    as `overhead_budget` allows."""
    every_seconds: float = 60.0
    """Take one also after this time, which bounds the loss, however long a step is; 0: not by
    time."""
    keep: str = "2"
    """Versions to keep: the number of newest complete ones; perhaps also one every so many steps
    (each multiple, or the next version if a multiple was not taken), and a number of best ones, by
    the metric given at boundaries: `2, every 1000, best 3`. Of a metric that shall grow, an
    accuracy: `best 3 highest`."""
    journal_steps: int = 0
    """Keep a journal of the gradients of every optimizer step, so that a restart makes the steps
    after the newest version again; and take a version at the latest after N steps, which limits the
    journal's room and the time of a restart. 0: no journal. With `peer_redundancy` another node
    has a copy of each rank's journal, so that it survives the loss of a node."""
    codecs: str = ""
    """Codecs applied to shards on the way to the level, in this order: `incremental`, `zstd
    level=1`, `aes-gcm`, or a codec of yours (see `tierckpt.codecs`); empty: none."""

    @property
    def retention(self) -> RetentionPolicy:
        """`keep`."""
        return RetentionPolicy.of_setting(self.keep, "local_keep")


MAX_PORT = 65535


class PeerConfig(Struct, frozen=True):
    """The peer level: a node's local level can be rebuilt from other nodes'.

    The agents make the redundancy of every version complete on local, without delaying training.
    """

    redundancy: str = "none"
    """`none`; `partner` or `partner <copies>`; `xor`, which survives one loss in a group; `rs
    <k>+<m>`, which survives m. A group has 8 members, those of `rs` k + m; `xor of 4` and `partner
    of 4` have groups of 4."""
    domain: str = ""
    """Name of the failure domain (a rack, a switch); empty: the node."""
    interface: str = ""
    """Network interface or address that the agents use, and votes between nodes, perhaps with the
    TCP port of the node's agent: `ib0`, `10.0.0.5:29400`, `[fd00::5]:29400`, `:29400`. Without one:
    that which reaches the other nodes, and any port."""

    @property
    def on(self) -> bool:
        """True unless `redundancy` is `none`."""
        return self.redundancy.strip().lower() != "none"

    @property
    def device(self) -> str:
        """`interface` without the port; empty: not given."""
        return self._place[0]

    @property
    def port(self) -> int:
        """The port of `interface`; 0: any."""
        return self._place[1]

    @property
    def _place(self) -> tuple[str, int]:
        """Raises ConfigError."""
        text = self.interface.strip()
        if text.count(":") > 1 and "[" not in text:
            return text, 0  # an IPv6 address alone
        found = re.fullmatch(r"(?:\[([^\[\]]*)\]|([^:\[\]]*))(?::(\d+))?", text)
        if found is None:
            raise ConfigError(
                f"peer_interface is {self.interface!r}; give an interface or an address, perhaps "
                "with a port: ib0, 10.0.0.5:29400, [fd00::5]:29400, :29400"
            )
        return found[1] or found[2] or "", int(found[3] or 0)


class PersistentConfig(Struct, frozen=True):
    """The persistent level: whole versions on a parallel file system or an object store.

    Such a version goes to local first, and is flushed from there when it is complete on all ranks.
    """

    path: str = ""
    """A directory that all nodes see, or a URL (s3://bucket/prefix); empty: no such level."""
    every_steps: Steps = 0
    """Take a version to this level every N optimizer steps; 0: not by steps; `auto`: as for memory,
    with at most half of the time spent on flushing."""
    every_seconds: float = 600.0
    """Take one also after this time; 0: not by time."""
    keep: str = "2"
    """Versions to keep, as `local_keep`."""
    bytes_per_second: float = 0.0
    """Limit of each node's rate; 0: no limit."""
    codecs: str = ""
    """Codecs of this level, as `local_codecs`, which are undone first; empty: none."""
    storage_options: str = ""
    """Options for the store's client besides the path: endpoint, keys, region. A
    directory takes `direct` and `shared_writes`. Given as a table (a mapping) or as JSON; kept as
    JSON. The options may be secret: they are shown nowhere, and the agent gets them over its
    private socket."""

    def __repr__(self) -> str:
        return repr_without(self, "storage_options")

    @property
    def retention(self) -> RetentionPolicy:
        """`keep`."""
        return RetentionPolicy.of_setting(self.keep, "persistent_keep")

    def options(self) -> dict[str, Any]:
        """`storage_options` as keyword arguments."""
        found: dict[str, Any] = json.loads(self.storage_options or "{}")
        return found

    def at(self, place: str) -> PersistentConfig:
        """The settings for another place, to read it or to put marks there. The options are kept
        for a URL; those of a directory concern writing shards."""
        url = "://" in directory_of(place)
        return replace(self, path=place, storage_options=self.storage_options if url else "")


TABLES = {
    "memory": MemoryConfig,
    "local": LocalConfig,
    "peer": PeerConfig,
    "persistent": PersistentConfig,
}
"""Tables with the settings of one level each."""
AUTOMATIC = [
    f"{name}_every_steps" for name, table in TABLES.items() if hasattr(table, "every_steps")
]
"""Settings that may be `auto`."""
STORAGE_OPTIONS = "persistent_storage_options"
KEEP = ("local_keep", "persistent_keep")
"""Texts that may also be given as a number."""


DAY_SECONDS, YEAR_SECONDS = 24 * 3600, 365 * 24 * 3600
"""Limits for times: longer than any useful wait, and short enough for every clock of the system
(some are limited to 25 days)."""


def one_of(name: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise ConfigError(f"{name} is {value!r}; valid: {', '.join(valid)}")


def at_least(name: str, value: float | Literal["auto"], least: float) -> None:
    if value != AUTO and not value >= least:  # NaN is not
        raise ConfigError(f"{name} is {value}; it must be {least} or more")


def within(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:  # NaN is not
        named = {DAY_SECONDS: " (a day)", YEAR_SECONDS: " (a year)"}.get(int(most), "")
        raise ConfigError(f"{name} is {value}; it must be from {least} to {most}{named}")


def parse_replicas(text: str) -> tuple[int, bool]:
    """From `replicas`: the boundaries in which everything is compared once, 50 unless it says
    another number, 0 if nothing is; and True to stop if replicas differ. Raises ConfigError."""
    if text.strip() == "off":
        return 0, False
    found = re.fullmatch(r"(warn|stop)(?: every ([1-9]\d*))?", " ".join(text.split()))
    if found is None:
        raise ConfigError(
            f"replicas is {text!r}; give warn, stop or off, perhaps with the boundaries in which "
            "everything is compared once: warn every 100, stop every 100"
        )
    return int(found[2] or 50), found[1] == "stop"


CLOUDS = ("aws", "gcp", "azure")
"""Clouds with notices that they take a machine away; see `halt.preemption`."""


def parse_signals(text: str) -> tuple[signal.Signals, ...]:
    """Signals from their names, `SIGTERM,SIGUSR1`. Raises ConfigError."""
    found = []
    for name in filter(None, (part.strip().upper() for part in text.split(","))):
        number = signal.Signals.__members__.get(name)
        if number is None or number in (signal.SIGKILL, signal.SIGSTOP):
            raise ConfigError(
                f"halt_signals: {name!r} is not a signal that can be handled; give names, for "
                "example SIGTERM,SIGUSR1, or nothing"
            )
        found.append(number)
    return tuple(found)


def parse_notices(text: str) -> tuple[str, str]:
    """Cloud and address of its metadata service from `halt_notices`; each is empty if not given.
    Raises ConfigError."""
    name, _, endpoint = text.strip().partition(" ")
    endpoint = endpoint.strip()
    if name and name not in CLOUDS:
        raise ConfigError(
            f"halt_notices is {text!r}; valid is one of {', '.join(CLOUDS)}, perhaps with the "
            "address of its metadata service ('aws http://127.0.0.1:1338'); or nothing"
        )
    if endpoint and not _is_address(endpoint):
        raise ConfigError(
            f"halt_notices is {text!r}; the address of the metadata service must be like "
            "http://127.0.0.1:1338"
        )
    return name, endpoint


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        more = parts.query or parts.fragment or parts.username or re.search(r"\s", text)
        return parts.scheme == "http" and bool(parts.hostname) and parts.port != 0 and not more
    except ValueError:  # no port
        return False


FOLDERS = ("path", "shm_dir", "events_dir", "trace_dir")
"""Settings that, like `persistent_path`, may start with `~`, the home directory, or be `file://`
URLs."""
NAME_BYTES = 255
"""Limit of a file name on Linux."""
DEFAULT_ID_BYTES = 53
"""As `storage.job_directory.job_id_of` makes it."""


def make_absolute(outer: dict[str, Any], persistent: dict[str, Any]) -> None:
    """Expand and make absolute the paths among the given settings at the top level and of the
    persistent level, in place. Raises ConfigError for a URL where a directory must be."""
    for given, name in (*((outer, n) for n in FOLDERS), (persistent, "path")):
        if name in given:
            given[name] = os.path.expanduser(directory_of(given[name]))
    for name in FOLDERS:
        if "://" in outer.get(name, ""):
            raise ConfigError(
                f"{name} is {outer[name]!r}, but must be a directory; for a URL use "
                "persistent_path, in addition to a path on the node's own disk"
            )
    outer.update({k: os.path.abspath(outer[k]) for k in ("path", "shm_dir") if outer.get(k)})
    if persistent.get("path") and "://" not in persistent["path"]:
        persistent["path"] = os.path.abspath(persistent["path"])


def check_places(config: Config) -> None:
    """Check paths and names here, where the setting's name is known."""
    if not config.path:
        raise ConfigError("path is empty; name the directory for checkpoints")
    if not config.shm_dir:
        raise ConfigError("shm_dir is empty; name a memory file system (default: /dev/shm)")
    for name in FOLDERS:
        _text(name, getattr(config, name))
    shared = config.persistent.path
    _text("persistent_path", shared)
    if shared in (config.path, config.directory):
        raise ConfigError(
            f"path and persistent_path are both {shared!r}; each level needs its own "
            "directory: path on the node's disk, persistent_path where all nodes see it"
        )
    if "{node}" in shared:
        raise ConfigError(
            f"persistent_path is {shared!r}; it is one place for all nodes, and {{node}} is "
            "allowed only in path"
        )
    for name in ("job_id", "node"):
        _file_name(name, getattr(config, name))
    folder_bytes = (len(config.job_id.encode()) or DEFAULT_ID_BYTES) + len(config.node.encode()) + 1
    if folder_bytes > NAME_BYTES:
        longer = max(("job_id", "node"), key=lambda name: len(getattr(config, name)))
        raise ConfigError(
            f"{longer} is too long ({len(getattr(config, longer))} letters): it is part of the "
            f"name of a folder, which would have {folder_bytes} bytes with job_id and node, "
            f"and the limit is {NAME_BYTES}"
        )


def _text(name: str, value: str) -> None:
    """Check that a path is UTF-8: the agent and manifests get it so."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name} is {value!r}, which is not UTF-8: {error.reason}") from None
    if "\0" in value:
        raise ConfigError(f"{name} is {value!r}; a path cannot contain a NUL character")


def _file_name(name: str, value: str) -> None:
    _text(name, value)
    if "/" in value or value in (".", ".."):
        raise ConfigError(
            f"{name} is {value!r}; it is part of folder names: give any text without '/' except "
            "'.' and '..'"
        )


def check(config: Config) -> None:
    """Raise ConfigError for the first wrong setting, or two that do not fit."""
    at_least("rollback_to", config.rollback_to, 0)
    one_of("when_busy", config.when_busy, ("skip", "wait"))
    one_of("data_witness", config.data_witness, ("error", "warn", "off"))
    parse_replicas(config.replicas)
    one_of("release", config.release, ("auto", "backward", "forward"))
    one_of("agent", config.agent, ("process", "inline"))
    within("agent_linger_seconds", config.agent_linger_seconds, 0, YEAR_SECONDS)
    one_of("boundary", config.boundary, ("explicit", "forward"))
    parse_signals(config.halt_signals)
    parse_notices(config.halt_notices)
    within("halt_grace_seconds", config.halt_grace_seconds, 0, YEAR_SECONDS)
    within("halt_seconds_left", config.halt_seconds_left, 0, YEAR_SECONDS)
    within("requeue_exit_status", config.requeue_exit_status, 0, 255)
    if config.slots:
        at_least("slots", config.slots, 2)
    if not 1e-4 <= config.overhead_budget < 1:  # NaN is not
        raise ConfigError(
            f"overhead_budget is {config.overhead_budget}; it must be a share of the training "
            "time, 0.0001 or more and below 1 (0.03 is 3 %)"
        )
    for level in ("memory", "local", "persistent"):
        for name in ("every_steps", "every_seconds"):
            at_least(f"{level}_{name}", getattr(getattr(config, level), name), 0)
    at_least("local_journal_steps", config.local.journal_steps, 0)
    within("the port of peer_interface", config.peer.port, 0, MAX_PORT)
    at_least("persistent_bytes_per_second", config.persistent.bytes_per_second, 0)
    local, persistent = config.local.retention, config.persistent.retention
    both = local.keep_best and persistent.keep_best
    if both and local.best_is_low != persistent.best_is_low:
        raise ConfigError(
            f"local_keep is {config.local.keep!r} and persistent_keep {config.persistent.keep!r}: "
            "say for both whether the lowest metric is the best, as without a word, or the highest"
        )
    _check_protected(config)
    _check_codecs(config)
    _check_exporters(config)
    _check_stages(config)
    check_places(config)
    _check_storage_options(config)


def _check_protected(config: Config) -> None:
    if not config.peer.on:
        return
    from tierckpt.erasure.groups import Scheme

    try:
        Scheme.parse(config.peer.redundancy)
    except ConfigError as error:
        raise ConfigError(f"peer_redundancy: {error}") from None
    if not config.uses("local"):
        raise ConfigError(
            f"peer_redundancy is {config.peer.redundancy!r}, but no version goes to the local "
            "level, which it protects: set local_every_steps or local_every_seconds, or set "
            "peer_redundancy to none"
        )


def _check_codecs(config: Config) -> None:
    """Report missing packages and keys at the start, not at the first commit."""
    if not (config.local.codecs or config.persistent.codecs):
        return
    from tierckpt.codecs.codec import Pipeline

    local = Pipeline.of_setting(config.local.codecs, "local_codecs")
    persistent = Pipeline.of_setting(config.persistent.codecs, "persistent_codecs")
    if local.delta:
        raise ConfigError(
            f"local_codecs is {config.local.codecs!r}: delta is for versions that the persistent "
            "level keeps for a long time (persistent_codecs); local_codecs takes incremental"
        )
    if persistent.delta and config.persistent.path and not config.persistent.retention.keep_every:
        raise ConfigError(
            f"persistent_codecs is {config.persistent.codecs!r}, but delta stores only versions "
            "that are kept every so many steps, and persistent_keep is "
            f'{config.persistent.keep!r}: make it "2, every 1000", or leave out delta'
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
        from tierckpt.exporters.exporter import exporters_of

        exporters_of(config.export)


def _check_stages(config: Config) -> None:
    """Report unknown stages at the start, and a mirror that is no second place."""
    if not config.stages:
        return
    from tierckpt import stages

    stages.check(config.stages)
    if not config.uses("local"):
        raise ConfigError(
            f"stages is {config.stages!r}, but no version goes to the local level, which stages "
            "read: set local_every_steps or local_every_seconds"
        )
    mirrors = stages.mirrors(config.stages, "")
    if mirrors and config.local.codecs:
        from tierckpt.codecs.codec import Pipeline

        if Pipeline.of_setting(config.local.codecs, "local_codecs").hides:
            raise ConfigError(
                f"local_codecs is {config.local.codecs!r}, and stages is {config.stages!r}: a "
                "mirror is not encrypted, so the second disk would have in the clear what the "
                "first one encrypts. Drop one of the two"
            )
    for directory in mirrors:
        if str(directory) in (config.path, config.persistent.path):
            raise ConfigError(
                f"stages is {config.stages!r}: {directory} is in use already as a level"
            )


def _check_storage_options(config: Config) -> None:
    """Check the options of a directory; a store's client checks its own. They may be secret."""
    if not config.persistent.storage_options or is_url(config.persistent.path):
        return
    options = config.persistent.options()
    for name in ("direct", "shared_writes"):
        if not isinstance(options.get(name, False), bool):
            raise ConfigError(f"{name} in {STORAGE_OPTIONS} must be true or false")


class Config(Struct, frozen=True):
    """All settings. Frozen: they do not change during a job."""

    path: str = "ckpts"
    """Directory of the local level, and, unless `job_id` says otherwise, the job's identity."""
    job_id: str = ""
    """Identity of the job: a job with the same id takes over versions in memory; empty: made from
    `path`. Jobs with different ids need different paths, too."""
    shm_dir: str = "/dev/shm"
    """Memory file system for the slots."""
    slots: int = 0
    """Slots per rank; 0: two, or three with a GPU, and for versions of up to 4 MiB a rank. Two are
    always safe; with a third, a version can be taken to memory while another one is still being
    written to disk or drained, and a small one is copied at its boundary."""
    rollback_to: int = 0
    """Go back to this version at the next restore, once: later restarts take the newest version
    since then (see `tierckpt rollback`). 0: take the newest version."""
    fork_from: str = ""
    """If this job has no version of its own, start from a version of another job: its path, or
    `PATH@v4000` (see `Checkpointer.restore`). Later starts take this job's own versions, so the
    setting may stay."""
    when_busy: str = "skip"
    """If a checkpoint is due and no slot is free: `skip` it, or `wait` for one. If a persistent
    level is slow: keep the newest waiting version, or `wait` for the level."""
    release: str = "auto"
    """Start of the copying: `backward` (with each layer's allreduce), `forward` (at once), or
    `auto`: backward, until the barrier has to wait for it; up to 4 MiB a rank, all at the
    boundary."""
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
    agent_linger_seconds: float = 60.0
    """Time that an agent waits for a new trainer after its own was killed, before it ends."""
    replicas: str = "warn"
    """Compare parameters and optimizer state between ranks: one slice at each boundary, everything
    once in 50 boundaries, or as many as you say: `warn every 100`. If replicas differ, `warn` with
    an event, and mark versions as suspect; or `stop`, with a ReplicaError on all ranks. `off`: do
    not compare."""
    data_witness: str = "error"
    """If a resumed loader gives another newest batch than before the restart: `error`, a
    RestoreError on all ranks before the first step; `warn`, with an event; `off`: do not
    compare."""
    halt_signals: str = "SIGTERM,SIGUSR1"
    """Signals that cause a last checkpoint and the end; empty: none."""
    halt_notices: str = ""
    """Cloud with notices that it takes this machine away, which cause a last checkpoint and the
    end: `aws`, `gcp` or `azure`, perhaps with the address of its metadata service,
    `aws http://127.0.0.1:1338`; empty: no notices."""
    halt_seconds_left: float = 0.0
    """Take a last checkpoint and end this long before the end of the scheduler's allocation, if the
    environment has it (SLURM_JOB_END_TIME), and this long before the time of a `tierckpt halt
    --before` without `--seconds-left`. 0: ignore the end of the allocation, and end only after that
    time."""
    halt_grace_seconds: float = 30.0
    """Time from a signal until the sender kills the remaining processes: torchrun, Slurm (KillWait)
    and Kubernetes all grant 30 s. If the end of the allocation is unknown, the end of the job waits
    for other nodes and the persistent level until 10 s before that. A process that received
    SIGTERM, and passes no boundary for a third of this time (and for twice its longest iteration),
    ends without a last checkpoint: others may be gone, and it would hang until it is killed."""
    requeue_exit_status: int = 0
    """Exit status of a script that ends though its work is not finished or not safe, so that a
    scheduler starts it again: it never calls `should_exit()`, and its processes, its node or its
    allocation end; or its training has finished, and its last version is missing on a level, which
    an error reports. A `tierckpt halt` always ends a script with 0. A status other than 0 ends the
    process by a SystemExit: from `close()`, or in Lightning and Transformers where `fit()` or
    `train()` would return."""
    stages: str = ""
    """Work of the node's agent on each version that is complete on all local disks, separated by
    commas: `mirror DIRECTORY`, a copy of the shards on a second disk of the node, where a restart
    looks, too; or a stage of yours (see `tierckpt.stages`). `{node}` stands for the node."""
    events_dir: str = ""
    """Write events to `<events_dir>/events-r<rank>.jsonl`, and for `tierckpt goodput` the progress
    of the training; empty: no file."""
    export: str = ""
    """Exporters of metrics, separated by commas: `prometheus 9400` (on this machine alone),
    `prometheus *:9400` (also to others), `prometheus FILE.prom`, `opentelemetry URL`, `tensorboard
    FOLDER`, `wandb`, `mlflow` (see `tierckpt.exporters`); empty: none."""
    trace_dir: str = ""
    """Write a timeline of the first 50 steps to `<trace_dir>/trace-r<rank>.json`; empty: no file,
    and no cost."""
    overhead_budget: float = 0.03
    """Limit of the share of training time that checkpoints on `auto` intervals take. An interval in
    seconds applies all the same."""
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
    def stages_here(self) -> str:
        """`stages` on this node."""
        return self.stages.replace("{node}", self.here)

    @property
    def here(self) -> str:
        """The name of this node, for `{node}` in `path`."""
        return self.node or socket.gethostname()

    @property
    def best(self) -> str:
        """The best metric, as a level keeps it: the `lowest`, or the `highest`."""
        kept = [level.retention for level in (self.local, self.persistent)]
        high = any(each.keep_best and not each.best_is_low for each in kept)
        return "highest" if high else "lowest"

    @property
    def compared_steps(self) -> int:
        """Boundaries in which replicas are compared once; 0: they are not."""
        return parse_replicas(self.replicas)[0]

    @property
    def stops_on_drift(self) -> bool:
        """True if a difference between replicas ends the job."""
        return parse_replicas(self.replicas)[1]

    @property
    def idle(self) -> list[str]:
        """Settings of the persistent level that have no effect, as `persistent_path` is not set."""
        if self.persistent.path:
            return []
        given, plain = asdict(self.persistent), asdict(PersistentConfig())
        return [f"persistent_{name}" for name, value in given.items() if value != plain[name]]

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
    for name in Config.__struct_fields__:
        kind = hints[name]
        if kind in TABLES.values():
            inner = get_type_hints(kind)
            known.update({f"{name}_{each}": _plain(inner[each]) for each in kind.__struct_fields__})
        else:
            known[name] = kind
    return known


def _plain(kind: Any) -> type:
    """The type of a setting without the `auto` that some accept."""
    return int if kind == Steps else kind


PREFIX = "TIERCKPT_"
NOT_SETTINGS = (
    *("ATTEMPT", "CONFIG", "ENCRYPTION_KEY", "ENCRYPTION_KEY_FILE", "FAULTS", "FAULTS_DIR"),
    *("PROVE_DIR", "COPY_ENGINE", "RESTART", "TEST_NICE"),
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
    """Raise ConfigError for a setting's variable with another prefix."""
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
        hint = question([repr(near) for near in near_names(key, candidates, cutoff=0.65)])
        raise ConfigError(
            f"unknown setting {key!r} in {source}; {hint}docs/settings.md lists all settings, as "
            "does help('tierckpt.Settings') in Python"
        )
    if kind is str and isinstance(value, os.PathLike):
        value = os.fspath(value)
    if key in KEEP and type(value) in (int, str):
        value = " ".join(str(value).split())  # ranks compare it
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
        what = "a number or a text" if key in KEEP else KINDS[kind]
        must = f"it must be {what}{f' of {unit}' if unit else ''}{either}"
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
    outer: dict[str, Any] = {"path": Config().path}
    for key, value in flat.items():
        table, _, name = key.partition("_")
        if table in inner:
            inner[table][name] = value
        else:
            outer[key] = value
    # From the start: the agent has another working directory, and a job may change its own.
    make_absolute(outer, inner["persistent"])
    return Config(**{name: kind(**inner[name]) for name, kind in TABLES.items()}, **outer)
