"""Settings, alike on all ranks: they decide alike without talking, so all must start from the same.

Who takes part in the job, and where, is found out along the way.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tierckpt._host import host_id
from tierckpt._text import some
from tierckpt.agent.environment import environment_fingerprint
from tierckpt.codecs.pipeline import Pipeline
from tierckpt.config import STORAGE_OPTIONS, TABLES, Config, known_settings, load_config
from tierckpt.errors import ConfigError, TierckptError, UnsupportedStateError
from tierckpt.group import Group, Node
from tierckpt.storage.files import file_lock
from tierckpt.storage.local.launch import Launch, launch_of, smallest
from tierckpt.storage.memory.job_directory import JobDirectory, job_id_of

from .error_barrier import gather_or_raise, raise_any
from .proof_order import redirected

PLACES = ("path", "shm_dir", "events_dir", "trace_dir", "job_id", "node")
OWN = frozenset((*PLACES, "peer_domain", "peer_interface", "peer_port"))
"""Settings that may differ between ranks: a node's disk may have the node's name in its path."""


@dataclass(frozen=True)
class JobTopology:
    """Who takes part in the job, and where; by rank."""

    hosts: tuple[str, ...]
    """Nodes, as `_host.host_id` names them."""
    names: tuple[str, ...]
    """Host names of their machines."""
    domains: tuple[str, ...]
    """What dies together."""
    environment: tuple[str, ...] = ()
    """See `environment.fingerprint`. Its node's first rank's count for an agent."""
    token: str = ""
    """Drawn for this attach, by rank 0."""
    launch: Launch = field(default_factory=Launch)
    """Of this rank's process."""
    starters: tuple[str, ...] = ()
    """Of all ranks: see `launch.Launch`."""

    def node(self, rank: int) -> Node:
        """The rank's node."""
        return Node.of(self.hosts[rank], self.hosts)


@dataclass(frozen=True)
class _Told:
    """What a rank tells the others."""

    compared: tuple[tuple[str, str], ...]
    where: tuple[str, str, str]
    """Node, host name, domain."""
    environment: str
    token: str
    """See `JobTopology`."""
    starters: tuple[str, ...]


def agree_on_settings(
    arguments: Mapping[str, Any], config_file: str | os.PathLike[str] | None, group: Group
) -> tuple[Config, JobTopology]:
    """Load this rank's settings, and compare them with the other ranks'. Collective.

    Raises ConfigError on all ranks, naming those whose settings cannot be used (a key may be
    missing on one node alone), or are not rank 0's. Where a rank comes to `refused` instead, an
    error of that kind.
    """
    loaded: list[tuple[Config, Launch]] = []

    def load() -> _Told:
        config = redirected(load_config(arguments, config_file=config_file))
        launch = launch_of(os.environ, in_use=_is_in_use(config))
        loaded.append((config, launch))
        host = host_id(config.node)
        where = (host, socket.gethostname(), config.peer.domain or host)
        compared, token = tuple(_compared(config)), secrets.token_hex(8)
        return _Told(compared, where, environment_fingerprint(), token, launch.starters)

    everyone = gather_or_raise(group, load, partial(_named, group.size))
    raise_any(_differences(everyone), _differ, group.rank)
    ((config, launch),) = loaded
    hosts, names, domains = zip(*(told.where for told in everyone), strict=True)
    environment = tuple(told.environment for told in everyone)
    starters = smallest(starter for told in everyone for starter in told.starters)
    token = everyone[0].token
    return config, JobTopology(hosts, names, domains, environment, token, launch, starters)


def refused(error: TierckptError, group: Group) -> TierckptError:
    """What this rank raises, as `error` says why it cannot take part at all. Collective, in the
    place of `agree_on_settings`, which raises the same on the ranks that could."""

    def load() -> None:
        raise error

    try:
        gather_or_raise(group, load, partial(_named, group.size))
    except TierckptError as same:
        return same
    raise AssertionError("this rank has raised")


def _named(size: int, ranks: list[int], theirs: TierckptError) -> TierckptError:
    """`theirs`, with the numbers of the ranks where not all have it."""
    if len(ranks) == size:
        return theirs
    kind = UnsupportedStateError if isinstance(theirs, UnsupportedStateError) else ConfigError
    return kind(f"{_text_of(ranks)}: {theirs}")


def _is_in_use(config: Config) -> bool:
    """Whether this process has a rank's place in the job already: another one's, in a group of
    other ranks."""
    job = config.job_id or job_id_of(config.path)
    return file_lock.any_held(JobDirectory.at(config.shm_dir, job, config.node).path)


def _compared(config: Config) -> Iterable[tuple[str, str]]:
    """What must be alike, by name, as text. Of keys it has the ids, of storage options a hash."""
    for name in known_settings():
        table, _, rest = name.partition("_")
        value = getattr(getattr(config, table), rest) if table in TABLES else getattr(config, name)
        if name.endswith("_codecs") and value:
            made = Pipeline.of_setting(value, name).description
            told = [f"{m} {p}={v}" for m, each in made for p, v in each.items()]
            value = ", ".join([value, *told])
        elif name == STORAGE_OPTIONS and value:
            value = hashlib.sha256(value.encode()).hexdigest()
        if name not in OWN:
            yield name, str(value)


def _differences(everyone: Sequence[_Told]) -> list[str]:
    """How each rank's settings differ from rank 0's; empty where they do not."""
    ours = everyone[0].compared
    return [
        "\n".join(
            _difference(name, theirs, mine)
            for (name, theirs), (_, mine) in zip(told.compared, ours, strict=True)
            if theirs != mine
        )
        for told in everyone
    ]


def _differ(ranks: list[int], lines: str) -> ConfigError:
    return ConfigError(
        f"{_text_of(ranks)} and rank 0 have different settings:\n{lines}\n"
        "All ranks need the same arguments, environment variables, file and keys."
    )


def _difference(name: str, theirs: str, ours: str) -> str:
    if name == STORAGE_OPTIONS:
        return f"  {name}, which is not shown"
    return f"  {name}={theirs} there, and {name}={ours} on rank 0"


def _text_of(ranks: Sequence[int]) -> str:
    return f"rank{'s' if ranks[1:] else ''} {some(ranks, 8)}"
