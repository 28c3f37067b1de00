"""Settings check: all ranks need equal settings, since they decide alike without communication.

The check also collects the job's topology: its ranks, nodes and failure domains.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import socket
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from tierckpt import _process
from tierckpt._process import host_id, host_name
from tierckpt._text import some
from tierckpt.agent.address import environment_fingerprint
from tierckpt.config import STORAGE_OPTIONS, TABLES, Config, known_settings, load_config
from tierckpt.errors import ConfigError, TierckptError, UnsupportedStateError
from tierckpt.events import EventLog
from tierckpt.group import Group, Node
from tierckpt.storage import answers, file_lock
from tierckpt.storage.claims import Launch, launch_of, smallest
from tierckpt.storage.job_directory import JobDirectory, job_id_of

from .error_barrier import gather_or_raise, raise_any
from .proof_order import redirected

PLACES = ("path", "shm_dir", "events_dir", "trace_dir", "job_id", "node")
OWN = frozenset((*PLACES, "peer_domain", "peer_interface", "export"))
"""Settings that may differ between ranks: a disk's path may contain the node's name."""


class JobTopology(Struct, frozen=True):
    """The job's nodes and failure domains, by rank."""

    hosts: tuple[str, ...]
    """Nodes, as `_process.host_id` names them."""
    names: tuple[str, ...]
    """Host names of their machines."""
    domains: tuple[str, ...]
    """Failure domains: the ranks of one domain fail together."""
    environment: tuple[str, ...] = ()
    """Environment fingerprints, see `agent.address`. An agent uses its node's first rank's."""
    token: str = ""
    """Random token for this attach, drawn by rank 0."""
    launch: Launch = field(default_factory=Launch)
    """Launch of this rank's process."""
    starters: tuple[str, ...] = ()
    """Starters of all ranks, see `claims.Launch`."""

    def node(self, rank: int) -> Node:
        """Return the rank's node."""
        return Node.of(self.hosts[rank], self.hosts)


class _RankSettings(Struct, frozen=True):
    """Values that a rank sends to the others."""

    digest: str
    """Checksum of the settings that must be equal: the settings themselves are kilobytes a rank."""
    where: tuple[str, str, str]
    """Node, host name, domain."""
    memory: int
    """Device number of the file system of `shm_dir`; 0: unknown."""
    environment: str
    token: str
    """Random token, see `JobTopology`."""
    starters: tuple[str, ...]


def agree_on_settings(
    arguments: Mapping[str, Any], config_file: str | os.PathLike[str] | None, group: Group
) -> tuple[Config, JobTopology]:
    """Load this rank's settings, and compare them with the other ranks'. Collective.

    Raises ConfigError on all ranks, naming those with unusable settings (a key may be missing on
    one node alone) or differ from rank 0's. If a rank calls `refused` instead, all raise an error
    of that kind.
    """
    loaded: list[tuple[Config, Launch, tuple[tuple[str, str], ...]]] = []

    def load() -> _RankSettings:
        config = redirected(load_config(arguments, config_file=config_file))
        config = _answering(config, group.rank)
        launch = launch_of(os.environ, in_use=_is_in_use(config))
        compared = tuple(_compared(config))
        loaded.append((config, launch, compared))
        host = host_id(config.node)
        where = (host, socket.gethostname(), config.peer.domain or host)
        digest, token = _digest(compared), secrets.token_hex(8)
        environment, memory = environment_fingerprint(), device_of(config.shm_dir)
        return _RankSettings(digest, where, memory, environment, token, launch.starters)

    with _process.collector_paused():  # some objects of every rank
        gathered = gather_or_raise(group, load, partial(_named, group.size))
    ((config, launch, compared),) = loaded
    if len({each.digest for each in gathered}) > 1:
        raise_any(_differences(group.all_gather_object(compared)), _differ, group.rank)
    apart = split_nodes([each.where[0] for each in gathered], [each.memory for each in gathered])
    raise_any(apart, lambda _, text: ConfigError(text), group.rank)
    hosts, names, domains = zip(*(each.where for each in gathered), strict=True)
    environment = tuple(each.environment for each in gathered)
    starters = smallest(starter for each in gathered for starter in each.starters)
    token = gathered[0].token
    return config, JobTopology(hosts, names, domains, environment, token, launch, starters)


def _answering(config: Config, rank: int) -> Config:
    """Return once the job's directory answers: nothing can be done without it. Return the settings
    without folders of events and traces that do not answer within `START_SECONDS`."""
    answers.ask_by_threads(config.agent == "inline")
    limit = answers.START_SECONDS
    places = [config.directory, config.events_dir, config.trace_dir]
    if not answers.silent(places, min(answers.SAY_SECONDS, limit)):
        return config

    def say(text: str, severity: int = logging.WARNING) -> None:
        EventLog(rank).emit("notice", message=text, severity=severity)

    waits = answers.silent(places, 0.0)
    for place in waits:
        say(f"{place} does not answer: the start waits for it")
    hang = answers.silent(waits, limit)
    for place in {config.events_dir, config.trace_dir}.intersection(hang):
        say(f"no events or traces are written to {place}, which does not answer", logging.ERROR)
    while answers.silent([config.directory], limit := 2 * limit):
        say(f"{config.directory} still does not answer: the start waits for it")
    events, trace = config.events_dir, config.trace_dir
    return replace(
        config,
        events_dir="" if events in hang else events,
        trace_dir="" if trace in hang else trace,
    )


def refused(error: TierckptError, group: Group) -> TierckptError:
    """Return the error to raise on this rank, which cannot take part because of `error`.
    Collective; called instead of `agree_on_settings`, which then raises the same error on the
    other ranks."""

    def load() -> None:
        raise error

    try:
        gather_or_raise(group, load, partial(_named, group.size))
    except TierckptError as same:
        return same
    raise AssertionError("this rank has raised")


def _named(size: int, ranks: list[int], theirs: TierckptError) -> TierckptError:
    """Return `theirs`, with the numbers of the ranks unless all ranks have it."""
    if len(ranks) == size:
        return theirs
    kind = UnsupportedStateError if isinstance(theirs, UnsupportedStateError) else ConfigError
    return kind(f"{_text_of(ranks)}: {theirs}")


def _is_in_use(config: Config) -> bool:
    """Whether this process already has a rank's place in the job, from another checkpointer in a
    group of other ranks."""
    job = config.job_id or job_id_of(config.path)
    return file_lock.any_held(JobDirectory.at(config.shm_dir, job, config.node).path)


def _compared(config: Config) -> Iterable[tuple[str, str]]:
    """Yield name and text of settings that must be equal; of keys the ids, of options a hash."""
    for name in known_settings():
        table, _, rest = name.partition("_")
        value = getattr(getattr(config, table), rest) if table in TABLES else getattr(config, name)
        if name.endswith("_codecs") and value:
            from tierckpt.codecs.codec import Pipeline

            made = Pipeline.of_setting(value, name).description
            codecs = [f"{m} {p}={v}" for m, each in made for p, v in each.items()]
            value = ", ".join([value, *codecs])
        elif name == STORAGE_OPTIONS and value:
            value = hashlib.sha256(value.encode()).hexdigest()
        if name not in OWN:
            yield name, str(value)


def _digest(compared: tuple[tuple[str, str], ...]) -> str:
    return hashlib.sha256(repr(compared).encode()).hexdigest()


def _differences(gathered: Sequence[Iterable[tuple[str, str]]]) -> list[str]:
    """Return each rank's differences from rank 0's settings; empty where there are none."""
    first = gathered[0]
    return [
        "\n".join(
            _difference(name, theirs, expected)
            for (name, theirs), (_, expected) in zip(each, first, strict=True)
            if theirs != expected
        )
        for each in gathered
    ]


def device_of(folder: str) -> int:
    """Device number of a folder's file system; 0: unknown."""
    try:
        return os.stat(folder).st_dev
    except OSError:  # the reason is reported when the folder is used
        return 0


def split_nodes(nodes: Sequence[str], memories: Sequence[int]) -> list[str]:
    """Return for each rank the reason why it is on the same node as another rank by name, but does
    not share its memory, as in containers of one machine; empty where there is none.

    `nodes`: host ids of all ranks; `memories`: device numbers of their `shm_dir`, see `device_of`.
    """
    first: dict[str, tuple[int, int]] = {}
    found = []
    for rank, (node, memory) in enumerate(zip(nodes, memories, strict=True)):
        other, known = first.setdefault(node, (rank, memory)) if memory else (rank, memory)
        found.append(
            f"ranks {other} and {rank} are on one node by its name, {host_name(node)}, but do not "
            "share its memory: shm_dir is another file system there, as in two containers of one "
            "machine. Give the ranks of each container a node name of their own "
            "(TIERCKPT_NODE), or mount one volume in memory into all containers"
            if memory != known
            else ""
        )
    return found


def _differ(ranks: list[int], lines: str) -> ConfigError:
    return ConfigError(
        f"{_text_of(ranks)} and rank 0 have different settings:\n{lines}\n"
        "All ranks need the same arguments, environment variables, configuration file and keys."
    )


def _difference(name: str, theirs: str, ours: str) -> str:
    if name == STORAGE_OPTIONS:
        return f"  {name}, with values that are not shown"
    return f"  {name}={theirs} there, and {name}={ours} on rank 0"


def _text_of(ranks: Sequence[int]) -> str:
    return f"rank{'s' if ranks[1:] else ''} {some(ranks, 8)}"
