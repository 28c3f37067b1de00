"""Configuration: constructor arguments over `TIERCKPT_*` variables over a TOML file.

One flat name serves everywhere: `local_every_steps=10` as an argument,
`TIERCKPT_LOCAL_EVERY_STEPS=10` in the environment, and in the file either
`local_every_steps = 10` or `every_steps = 10` in a table `[local]`.
"""

from __future__ import annotations

import difflib
import functools
import json
import os
import signal
import socket
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_type_hints

from ._text import directory_of
from .errors import ConfigError

PREFIX = "TIERCKPT_"
NOT_SETTINGS = (
    *("CONFIG", "ENCRYPTION_KEY", "ENCRYPTION_KEY_FILE", "FAULTS", "FAULTS_DIR"),
    "PROVE_DIR",
)
"""Variables with our prefix that are not settings."""
AUTO: Literal["auto"] = "auto"
"""In place of a number of steps: as often as the overhead budget allows; see `tuning`."""
Steps = int | Literal["auto"]


@dataclass(frozen=True)
class MemoryConfig:
    """The memory level: sealed slots, which survive a crashed process."""

    every_steps: Steps = 1
    """Take a version to memory every so many optimizer steps; 0: not by steps; `auto`: as often as
    `overhead_budget` allows."""
    every_seconds: float = 0.0
    """... or when this much time has passed; 0: not by time."""
    linger_seconds: float = 3600.0
    """Segments of a *dead* job are removed by the next job when nobody came back for so long."""


@dataclass(frozen=True)
class LocalConfig:
    """The local level: shard files on a node-local file system."""

    every_steps: Steps = 0
    """As for memory."""
    every_seconds: float = 60.0
    """By default once a minute: a bound on what is lost, however long a step is."""
    keep_last: int = 2
    """Keep so many of the newest complete versions (at least 1)."""
    keep_every: int = 0
    """Also keep every version that is a multiple of this; 0: none."""
    keep_best: int = 0
    """Also keep so many of the best by the metric given at boundaries (see `best`); 0: none."""
    in_place: bool = True
    """Where the directory is memory (tmpfs, DAX) and there are no codecs, slots are files in it,
    and are committed without a copy (see `image_file`). False: a copy of its own for each level."""
    codecs: str = ""
    """What is done to shards on their way, in this order: `incremental`, `zstd level=1`,
    `aes-gcm`, or a codec of yours (see `tierckpt.codecs`); empty: nothing."""


@dataclass(frozen=True)
class PeerConfig:
    """The peer level: what is on a node's local level can be rebuilt from other nodes'.

    Made of every version that is complete on local, by the agents, behind the training's back.
    """

    redundancy: str = "none"
    """`none`; `partner` or `partner <copies>`; `xor`, which survives one loss in a group; `rs
    <k>+<m>`, which survives m."""
    group_size: int = 8
    """Members of a group; for `rs` they are k + m."""
    domain: str = ""
    """What dies together, by name (a rack, a switch); empty: the node."""
    interface: str = ""
    """Network interface or address that the agents use; empty: the one towards the other nodes."""
    port: int = 0
    """TCP port that a node's agent listens at; 0: any."""


@dataclass(frozen=True)
class PersistentConfig:
    """The persistent level: whole versions on a parallel file system or an object store.

    A version that goes there goes to local first, and is flushed from there when it is complete on
    all ranks.
    """

    path: str = ""
    """A directory that all nodes see, or a URL that fsspec knows (s3://bucket/prefix); empty: no
    such level."""
    every_steps: Steps = 0
    """Take a version there every so many optimizer steps; 0: not by steps; `auto`: as for memory,
    and at most half of the time is spent on flushing."""
    every_seconds: float = 600.0
    """... or when this much time has passed; 0: not by time."""
    keep_last: int = 2
    """Keep so many of the newest versions (at least 1)."""
    keep_every: int = 0
    """Also keep every version that is a multiple of this; 0: none."""
    keep_best: int = 0
    """As for local."""
    bytes_per_second: float = 0.0
    """Of each node at most; 0: no limit."""
    nodes_at_once: int = 0
    """So many nodes flush at any moment, in turns; 0: no limit."""
    shards_per_file: int = 64
    """Aggregation: so many ranks' shards share a file."""
    read_back: bool = False
    """Read every byte again before a version is declared complete."""
    drop_superseded: bool = False
    """Give up a flush when a newer version is waiting for it, at most twice in a row."""
    codecs: str = ""
    """As for local; what was done there is undone first."""
    storage_options: str = field(default="", repr=False)
    """What the store's client is to be told besides the path, for fsspec: endpoint, key, region;
    a directory takes `direct` and `shared_writes`. Given as a table (a mapping), or as JSON; kept
    as JSON. May be secret: shown nowhere, and handed to the agent over its private socket."""

    def options(self) -> dict[str, Any]:
        """`storage_options` as keyword arguments."""
        found: dict[str, Any] = json.loads(self.storage_options or "{}")
        return found

    def at(self, place: str) -> PersistentConfig:
        """The same for a place that somebody named, to read it or to put marks there: the options
        are for URLs. What a directory takes is about how shards are written."""
        url = "://" in directory_of(place)
        return replace(self, path=place, storage_options=self.storage_options if url else "")


@dataclass(frozen=True)
class Config:
    """All settings. Frozen: what a job runs with does not change under it."""

    path: str = "ckpts"
    """Directory of the local level, and, unless `job_id` says otherwise, the job's identity."""
    job_id: str = ""
    """Whose successor may take over what is in memory; empty: made from `path`. Jobs with other ids
    need other paths, too."""
    shm_dir: str = "/dev/shm"
    """Memory file system for the slots."""
    slots: int = 0
    """Slots per rank; 0: two, or three with a GPU. Two are enough to be always safe; a third lets a
    version be taken to memory while another one is still being written to disk or drained."""
    when_busy: str = "skip"
    """When a checkpoint is due and no slot is free: `skip` it, or `wait` for one. Of what waits for
    a slow persistent level: keep the newest, or `wait` for the level."""
    release: str = "auto"
    """When copying starts: `backward` (with each layer's allreduce), `forward` (at once), or
    `auto`: backward, until the barrier turns out to wait for it."""
    boundary: str = "explicit"
    """`explicit`: a call of `step()` is the boundary, and nothing else; `forward`: the next forward
    pass in training mode after an optimizer step is. `restore()` returns calls, or steps."""
    forward_changes: str = ""
    """Parameters that the forward pass changes in place (it normalises its weights), by name, with
    commas between; `*` stands for any part of a name. They are copied at the boundary, whole on
    each rank, as buffers are. So are those that differ from rank to rank by design."""
    node: str = ""
    """Name of this node, where the host name will not do: several nodes on one machine, in tests.
    In `path`, `{node}` stands for the node's name."""
    agent: str = "process"
    """`process`: one a node, which outlives its trainers; `inline`: a thread of each trainer, for
    debugging and for places that forbid child processes."""
    agent_nice: int = 10
    """CPU niceness of the agent, above its trainers'."""
    agent_linger_seconds: float = 60.0
    """An agent whose trainer was killed waits so long for its successor, and then ends."""
    replica_check_steps: int = 50
    """Compare parameters and optimizer state of all ranks, a slice at each boundary, all of it once
    in so many; 0: do not."""
    on_drift: str = "warn"
    """When they differ: `warn` with an event, and mark versions as suspect; or `stop`, with a
    ReplicaError on all ranks."""
    halt_signals: str = "SIGTERM,SIGUSR1"
    """Signals that mean: one last checkpoint, and the end; empty: none."""
    halt_patience_seconds: float = 10.0
    """A process that SIGTERM came to, and that passes no boundary for so long (and for twice its
    longest iteration), ends without a last checkpoint: others may be gone, and it would hang until
    the launcher kills it. Longer where an evaluation between two boundaries takes longer."""
    halt_seconds_left: float = 0.0
    """End after a last checkpoint when so many seconds of the scheduler's allocation are left, if
    its environment tells its end (SLURM_JOB_END_TIME), and so long before the time of a
    `tierckpt halt --before` that names no `--seconds-left`; 0: do not look at the end of the
    allocation, and end only after that time."""
    halt_grace_seconds: float = 30.0
    """So long after a signal what has not ended is killed: by torchrun, Slurm (KillWait), or
    Kubernetes, which all grant 30 s. Where it is not known when the allocation ends, the end waits
    for other nodes and the persistent level until 10 s before that."""
    health: str = "off"
    """Check every node's directories and memory at the start: `off`; `warn` names nodes that are
    not well; `refuse` also ends the start there."""
    health_seconds: float = 20.0
    """A directory that does not answer for so long is not well."""
    events_dir: str = ""
    """Write events to `<events_dir>/events-r<rank>.jsonl`; empty: no file."""
    trace_dir: str = ""
    """Write what happened when to `<trace_dir>/trace-r<rank>.json`; empty: no file, and no cost."""
    trace_steps: int = 50
    """Stop that after so many steps of every run: a few tell all, and a thousand ranks' files stay
    small."""
    best: str = "lowest"
    """Which metric is best, for `local_keep_best` and `persistent_keep_best`: the `lowest` (a
    loss), or the `highest` (an accuracy)."""
    overhead_budget: float = 0.03
    """Intervals that are `auto` are so long that checkpoints take at most this share of the
    training's time. An interval in seconds is kept all the same."""
    mean_failure_seconds: float = 0.0
    """How far failures of the job are apart, on average: intervals that are `auto` are then no
    shorter than is best (see `tierckpt interval`); 0: unknown, and all of the budget is used."""
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    local: LocalConfig = field(default_factory=LocalConfig)
    peer: PeerConfig = field(default_factory=PeerConfig)
    persistent: PersistentConfig = field(default_factory=PersistentConfig)

    def __post_init__(self) -> None:
        """Check the values. Raises ConfigError."""
        _one_of("when_busy", self.when_busy, ("skip", "wait"))
        _one_of("on_drift", self.on_drift, ("warn", "stop"))
        _at_least("replica_check_steps", self.replica_check_steps, 0)
        _one_of("release", self.release, ("auto", "backward", "forward"))
        _one_of("agent", self.agent, ("process", "inline"))
        _within("agent_nice", self.agent_nice, -20, 19)
        _within("agent_linger_seconds", self.agent_linger_seconds, 0, YEAR_SECONDS)
        _one_of("boundary", self.boundary, ("explicit", "forward"))
        parse_signals(self.halt_signals)
        _within("halt_patience_seconds", self.halt_patience_seconds, 0, YEAR_SECONDS)
        _within("halt_grace_seconds", self.halt_grace_seconds, 0, YEAR_SECONDS)
        _within("halt_seconds_left", self.halt_seconds_left, 0, YEAR_SECONDS)
        _one_of("health", self.health, ("off", "warn", "refuse"))
        _within("health_seconds", self.health_seconds, 0.1, DAY_SECONDS)
        if self.slots:
            _at_least("slots", self.slots, 2)
        _at_least("trace_steps", self.trace_steps, 1)
        if not 1e-4 <= self.overhead_budget < 1:  # NaN is not
            raise ConfigError(
                f"overhead_budget is {self.overhead_budget}; it is a share of the training's time, "
                "0.0001 or more and below 1 (0.03 are 3 %)"
            )
        _at_least("mean_failure_seconds", self.mean_failure_seconds, 0)
        _one_of("best", self.best, ("lowest", "highest"))
        _at_least("local_keep_last", self.local.keep_last, 1)
        for name in ("memory_every_steps", "memory_every_seconds", "memory_linger_seconds"):
            _at_least(name, getattr(self.memory, name.removeprefix("memory_")), 0)
        for name in ("every_steps", "every_seconds", "keep_every", "keep_best"):
            _at_least(f"local_{name}", getattr(self.local, name), 0)
        _at_least("peer_group_size", self.peer.group_size, 2)
        _within("peer_port", self.peer.port, 0, 65535)
        persistent = self.persistent
        _at_least("persistent_keep_last", persistent.keep_last, 1)
        _at_least("persistent_shards_per_file", persistent.shards_per_file, 1)
        for name in ("every_steps", "every_seconds", "keep_every", "keep_best"):
            _at_least(f"persistent_{name}", getattr(persistent, name), 0)
        for name in ("bytes_per_second", "nodes_at_once"):
            _at_least(f"persistent_{name}", getattr(persistent, name), 0)
        self._check_protected()
        self._check_codecs()
        self._check_places()
        self._check_storage_options()

    def _check_protected(self) -> None:
        if self._wants_parity and not self.uses("local"):
            raise ConfigError(
                f"peer_redundancy is {self.peer.redundancy!r}, and protects what is on the local "
                "level, where nothing goes: set local_every_steps or local_every_seconds, or "
                "peer_redundancy to none"
            )

    def _check_places(self) -> None:
        """Here, where it is known which setting it is."""
        if not self.path:
            raise ConfigError("path is empty; name the directory that checkpoints go to")
        if not self.shm_dir:
            raise ConfigError("shm_dir is empty; name a memory file system (default: /dev/shm)")
        for name in FOLDERS:
            _text(name, getattr(self, name))
        shared = self.persistent.path
        _text("persistent_path", shared)
        if shared in (self.path, self.directory):
            raise ConfigError(
                f"path and persistent_path are both {shared!r}; each level needs a directory of "
                "its own: path on the node's disk, persistent_path where all nodes see it"
            )
        if "{node}" in shared:
            raise ConfigError(
                f"persistent_path is {shared!r}; it is one place for all nodes, and only in path "
                "does {node} stand for the node's name"
            )
        for name in ("job_id", "node"):
            _file_name(name, getattr(self, name))
        folder_bytes = (len(self.job_id.encode()) or DEFAULT_ID_BYTES) + len(self.node.encode()) + 1
        if folder_bytes > NAME_BYTES:
            longer = max(("job_id", "node"), key=lambda name: len(getattr(self, name)))
            raise ConfigError(
                f"{longer} is too long ({len(getattr(self, longer))} letters): a folder is named "
                f"after job_id and node, and its name can have {NAME_BYTES} bytes; they would make "
                f"it {folder_bytes}"
            )

    def _check_storage_options(self) -> None:
        """Of a directory; what else a store's client takes, that knows. May be secret."""
        if not self.persistent.storage_options:
            return
        from ._text import is_url

        if is_url(self.persistent.path):
            return
        options = self.persistent.options()
        for name in ("direct", "shared_writes"):
            if not isinstance(options.get(name, False), bool):
                raise ConfigError(f"{name} in {STORAGE_OPTIONS} must be true or false")

    def _check_codecs(self) -> None:
        """Packages and keys that are missing are told at the start, not by the first commit."""
        if not (self.local.codecs or self.persistent.codecs):
            return
        from tierckpt.codecs.pipeline import Pipeline

        local = Pipeline.of_setting(self.local.codecs, "local_codecs")
        Pipeline.of_setting(self.persistent.codecs, "persistent_codecs")
        if local.hides and self.uses("peer"):
            raise ConfigError(
                f"local_codecs is {self.local.codecs!r}, and peer_redundancy is "
                f"{self.peer.redundancy!r}: parity is made of shards as they are, so other nodes' "
                "disks would hold in the clear what this one encrypts. Encrypt on the persistent "
                "level (persistent_codecs), or do without one of the two"
            )

    @property
    def directory(self) -> str:
        """`path` on this node."""
        return self.path.replace("{node}", self.here)

    @property
    def here(self) -> str:
        """What `{node}` in `path` stands for on this node."""
        return self.node or socket.gethostname()

    @property
    def idle(self) -> list[str]:
        """Settings that were given for a persistent level, of which nobody said where it is."""
        if self.persistent.path:
            return []
        there = fields(PersistentConfig)
        given = [f.name for f in there if getattr(self.persistent, f.name) != f.default]
        return [f"persistent_{name}" for name in given]

    @property
    def _wants_parity(self) -> bool:
        return self.peer.redundancy.strip().lower() != "none"

    def uses(self, level: str) -> bool:
        """True when versions go to this level now and then; what is persistent is local first."""
        if level == "local" and self.uses("persistent"):
            return True
        if level == "peer":
            return self._wants_parity and self.uses("local")
        table = getattr(self, level)
        there = level != "persistent" or bool(self.persistent.path)
        return there and (table.every_steps != 0 or table.every_seconds > 0)


TABLES = {
    "memory": MemoryConfig,
    "local": LocalConfig,
    "peer": PeerConfig,
    "persistent": PersistentConfig,
}
"""Settings of one level each."""
AUTOMATIC = ("memory_every_steps", "local_every_steps", "persistent_every_steps")
"""Numbers that may be `auto`."""
FOLDERS = ("path", "shm_dir", "events_dir", "trace_dir")
"""As `persistent_path`, they may begin with `~`, the home directory, or be `file://` URLs."""
STORAGE_OPTIONS = "persistent_storage_options"
NAME_BYTES = 255
"""Of a file, on Linux."""
DAY_SECONDS, YEAR_SECONDS = 24 * 3600, 365 * 24 * 3600
"""Longer than anybody waits, and short enough for every clock of the system: some count no more
than 25 days."""
DEFAULT_ID_BYTES = 53
"""See `job_directory.job_id_of`."""


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
    """The type of a setting, but for the `auto` that some take, too."""
    return int if kind == Steps else kind


def load_config(
    arguments: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    config_file: str | os.PathLike[str] | None = None,
) -> Config:
    """Merge the three sources. Raises ConfigError, naming the setting and where it was set.

    `config_file` may also be named by TIERCKPT_CONFIG; without either none is read.
    """
    environment = os.environ if environment is None else environment
    config_file = config_file or environment.get(PREFIX + "CONFIG") or None
    flat: dict[str, Any] = {}
    if config_file is not None:
        flat.update(_from_file(Path(config_file).expanduser()))
    for name, text in environment.items():
        if name.startswith(PREFIX) and name.removeprefix(PREFIX) not in NOT_SETTINGS:
            key = name.removeprefix(PREFIX).lower()
            flat[key] = _convert(key, text, f"the environment variable {name}")
    for key, value in (arguments or {}).items():
        if value is not None:
            flat[key] = _convert(key, value, GIVEN)
    return _build(flat)


def _from_file(path: Path) -> dict[str, Any]:
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
                f"there is no table [{key}] in the file {path}: settings of a level are in "
                f"{', '.join(f'[{table}]' for table in TABLES)}, all others at the top, in none"
            )
        for name, given in inner.items():
            if name in flat:
                table, _, rest = name.partition("_")
                raise ConfigError(
                    f"{name} is given twice in the file {path}: so, and as {rest} in [{table}]"
                )
            flat[name] = _convert(name, given, f"the file {path}")
    return flat


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
"""What a Checkpointer takes beside settings: meant, too, by whoever mistypes one."""


def _convert(key: str, value: Any, source: str) -> Any:
    kind = known_settings().get(key)
    if kind is None:
        candidates = [*known_settings(), *(ARGUMENTS if source == GIVEN else ())]
        near = difflib.get_close_matches(key, candidates, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"unknown setting {key!r} in {source}; {hint}Valid ones: {', '.join(known_settings())}"
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
        must = f"it must be {kind.__name__}{either}"
        raise ConfigError(f"{key} in {source} is {value!r}; {must}") from None
    return value


def _storage_options(value: Any, source: str) -> str:
    """A mapping, or JSON of one, as JSON. What was given is not repeated: it may be secret."""
    try:
        options = json.loads(value) if isinstance(value, str) and value else value or {}
        if isinstance(options, Mapping):
            return json.dumps(dict(options), sort_keys=True) if options else ""
    except (TypeError, ValueError):  # whose texts, and whose traces, may show it
        pass
    raise ConfigError(
        f"{STORAGE_OPTIONS} in {source} must be a table of names and values that JSON can hold, or "
        "as a text the same in JSON, like "
        '{"endpoint_url": "https://...", "client_kwargs": {"region_name": "..."}}'
    )


def _build(flat: Mapping[str, Any]) -> Config:
    inner: dict[str, dict[str, Any]] = {table: {} for table in TABLES}
    # Absolute from the start: the agent has another working directory, and a job may change its.
    outer: dict[str, Any] = {"path": Config.path}
    for key, value in flat.items():
        table, _, name = key.partition("_")
        if table in inner:
            inner[table][name] = value
        else:
            outer[key] = value
    shared = inner["persistent"]
    for given, name in (*((outer, n) for n in FOLDERS), (shared, "path")):
        if name in given:
            given[name] = os.path.expanduser(directory_of(given[name]))
    for name in FOLDERS:
        if "://" in outer.get(name, ""):
            raise ConfigError(
                f"{name} is {outer[name]!r}, and must be a directory; versions go to a URL by "
                "persistent_path, beside path on the node's own disk"
            )
    outer.update({k: os.path.abspath(outer[k]) for k in ("path", "shm_dir") if outer.get(k)})
    if shared.get("path") and "://" not in shared["path"]:
        shared["path"] = os.path.abspath(shared["path"])
    return Config(**{name: kind(**inner[name]) for name, kind in TABLES.items()}, **outer)


def _one_of(name: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise ConfigError(f"{name} is {value!r}; valid: {', '.join(valid)}")


def _text(name: str, value: str) -> None:
    """Paths go to the agent, and into manifests, as UTF-8."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name} is {value!r}, which is no UTF-8: {error.reason}") from None
    if "\0" in value:
        raise ConfigError(f"{name} is {value!r}; no path has a NUL character in it")


def _file_name(name: str, value: str) -> None:
    _text(name, value)
    if "/" in value or value in (".", ".."):
        raise ConfigError(
            f"{name} is {value!r}; folders are named after it: any text without '/' will do, but "
            "for '.' and '..'"
        )


def _at_least(name: str, value: float | Literal["auto"], least: float) -> None:
    if value != AUTO and not value >= least:  # NaN is not
        raise ConfigError(f"{name} is {value}; it must be {least} or more")


def _within(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:  # NaN is not
        named = {DAY_SECONDS: " (a day)", YEAR_SECONDS: " (a year)"}.get(int(most), "")
        raise ConfigError(f"{name} is {value}; it must be from {least} to {most}{named}")


def parse_signals(text: str) -> tuple[signal.Signals, ...]:
    """Signals from their names, `SIGTERM,SIGUSR1`. Raises ConfigError."""
    found = []
    for name in filter(None, (part.strip().upper() for part in text.split(","))):
        number = signal.Signals.__members__.get(name)
        if number is None or number in (signal.SIGKILL, signal.SIGSTOP):
            raise ConfigError(
                f"halt_signals: {name!r} is no signal that can be handled; "
                "give names, for example SIGTERM,SIGUSR1, or nothing"
            )
        found.append(number)
    return tuple(found)
