"""Values that messages between trainers and agents carry. Pure; neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tierckpt.config import PersistentConfig
from tierckpt.format.facts import VersionFacts
from tierckpt.format.ids import ShardKey, VersionId
from tierckpt.format.manifest import digest
from tierckpt.format.version_names import VersionName

Mark = tuple[int, str]
"""A generation and a digest: they distinguish lists of nodes, and order them by age."""


@dataclass(frozen=True)
class PersistentSettings(PersistentConfig):
    """The persistent level's settings, and which of the job's nodes this one is."""

    node: int = 0
    nodes: int = 1
    best: str = "lowest"
    """The job's setting, see `Config.best`."""


@dataclass(frozen=True)
class SessionSettings:
    """One trainer: its shard, its local level and the rules for its shards there."""

    directory: str
    """The directory of the local level."""
    shard: int
    shards: int
    keep_last: int
    keep_every: int
    persistent: PersistentSettings | None = field(default=None, repr=False)
    """The persistent level, if there is one; its settings may hold secrets."""
    codecs: str = ""
    """The codecs of the local level; see `codecs.pipeline`."""
    ranks: tuple[int, ...] = ()
    """The job's ranks on this node; the first one's session handles shards without a session."""
    trace_dir: str = ""
    """Where the agent records the cores in use (see `usage`); empty: nowhere."""

    @property
    def first(self) -> bool:
        """Whether the trainer is the node's first rank."""
        return self.ranks[:1] == (self.shard,)

    @property
    def speaks(self) -> bool:
        """Whether the trainer speaks for the node: it is `first`, or its ranks are not known."""
        return self.first or not self.ranks


@dataclass(frozen=True)
class FlushOrder:
    """One version that is complete on the local level of all ranks. Alike on all nodes, except
    `directory`, `here` and `node`."""

    directory: str
    """The directory of the local level."""
    here: tuple[int, ...]
    """Shards that this node's local level has."""
    facts: VersionFacts
    largest_bytes: int
    """Length of the version's longest shard."""
    node: str
    """The node of the job's memory level: on one node, only one run of the job can be alive."""

    @property
    def id(self) -> VersionId:
        """The version."""
        return self.facts.id

    @property
    def name(self) -> VersionName:
        """The version's name on the persistent level."""
        return self.facts.name

    @property
    def keys(self) -> list[ShardKey]:
        """The node's shards."""
        return [self.facts.key(shard) for shard in self.here]


@dataclass(frozen=True)
class ServedPlaces:
    """The places that an agent serves to other nodes: the local level's `directory`, and the job's
    memory, the folder `job` in `root`."""

    root: str
    job: str
    directory: str


@dataclass(frozen=True)
class ListenSettings:
    """The address where an agent listens for other nodes' agents; see `Protector.open`."""

    secret: str = field(repr=False)
    """The run's secret, which its agents prove to know."""
    interface: str
    port: int
    """0: any port."""
    towards: str
    """The name of another node; the route to it selects the interface."""
    serves: ServedPlaces | None = None


@dataclass(frozen=True)
class PartySettings:
    """One shard of this node, its group, and the addresses of the other members' agents."""

    shard: int
    ranks: tuple[int, ...]
    n: int
    k: int
    m: int
    hosts: tuple[str, ...]
    ports: tuple[int, ...]


@dataclass(frozen=True)
class AgentAddress:
    """The address where a node's agent listens for other nodes' agents."""

    host: str
    """The node's name, as `_host.host_id` makes it."""
    address: str
    port: int
    secret: str
    """The secret of the run in which the agent last met others."""

    @property
    def node(self) -> str:
        """The node's name for people."""
        return self.host.partition("/")[0]

    @property
    def where(self) -> str:
        """The name of the place in messages."""
        return f"agent of node {self.node}, {self.address} port {self.port}"


@dataclass(frozen=True)
class KnownNodes:
    """The agents of one run of the job, and those of earlier runs that it had to ask."""

    generation: int
    """The run's generation."""
    agents: tuple[AgentAddress, ...]

    def without(self, hosts: Iterable[str]) -> KnownNodes:
        """Return the agents of nodes other than `hosts`."""
        here = set(hosts)
        former_nodes = tuple(each for each in self.agents if each.host not in here)
        return KnownNodes(self.generation, former_nodes)

    @property
    def mark(self) -> Mark:
        """A mark that is equal for equal lists."""
        return self.generation, digest(repr(self.agents).encode()).hex()
