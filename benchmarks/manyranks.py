"""What does a job of many ranks cost one rank at a restart, and one node at a flush? One process.

    python benchmarks/manyranks.py --toy
    python benchmarks/manyranks.py --json manyranks.json --plot manyranks.png

The real code of one rank runs with the inventories, manifests and layouts of 2 to 16,384 ranks on
nodes of eight. The other ranks are the objects that they would send. Times are CPU times of this
process; the network is not in them.

The store and slots are real, too. Figures of the results file:

settings, groups          comparing all ranks' settings; planning the redundancy groups
meeting, agent            all agents meet at a run's start; what one is told, its connections
inventories               exchanging those of all nodes: time, bytes
plan_*                    plan of a restart: memory, a lost node, persistent with half the ranks
history                   a restart's questions about the versions found
layout                    dividing 1,200 tensors of 10 MB
flush_first/last_node     flush of a node's shards, and its requests; the last writes the manifest
open_shard, list, verify, retire   work on the version there
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from lib.files import temporary
from lib.machine import description
from lib.many_ranks.picture import Figures, plot
from lib.many_ranks.stand_ins import (
    IMAGE_BYTES,
    LOCAL,
    MEMORY,
    NODE_RANKS,
    CountedRequests,
    Node,
    OneOfMany,
    SilentAgent,
    all_nodes,
    exchanged,
    facts,
    manifest,
    measure,
)
from lib.report import publish
from lib.terminal import parser_of
from tierckpt import _process
from tierckpt.agent.protocol import packets_of
from tierckpt.cli.main import main as tierckpt
from tierckpt.config import RetentionPolicy, load_config
from tierckpt.coordination.job_history import JobHistory
from tierckpt.coordination.peers import Groups, PeerSetup
from tierckpt.coordination.settings_check import JobTopology, agree_on_settings
from tierckpt.core.decisions import Vote
from tierckpt.core.restore_plan import Found, plan_restore
from tierckpt.core.retention import retirable
from tierckpt.erasure.groups import Scheme, plan_groups
from tierckpt.format.ids import VersionId
from tierckpt.format.layout import TensorSpec, plan_layout
from tierckpt.storage.persistent import PersistentStore, ShardSource

WORLDS = (2, 64, 1024, 4096, 16384)
TOY_WORLDS = (2, 64)
TENSORS = 1200
"""Tensors of a model of 1 billion parameters with Adam; each has 2.5 million elements."""


class World:
    """All parts, for one number of ranks."""

    def __init__(self, ranks: int, folder: Path) -> None:
        self.ranks, self._folder = ranks, folder
        self.figures: Figures = {"ranks": ranks}

    def _note(self, part: str, **figures: float) -> None:
        self.figures |= {f"{part}_{name}": value for name, value in figures.items()}

    def measure(self) -> Figures:
        """Return the figures of all parts by name."""
        self.figures["vote_bytes"] = 8.0 * len(Vote().pack())
        self._attach()
        history = self._look()
        self._plan(history)
        self._layout()
        self._retention()
        self._flush()
        return self.figures

    def _attach(self) -> None:
        """Settings of all ranks, and their redundancy groups."""

        def others(turn: int, own: Any) -> Iterator[Any]:
            trouble, settings = own
            for rank in range(1, self.ranks):
                name = f"node{rank // NODE_RANKS:05d}"
                where = f"{name}/{'0' * 32}", name, f"rack{rank // 64:05d}"
                yield trouble, replace(settings, where=where, starters=(f"{rank // 8:032x}",))

        group: Any = OneOfMany(self.ranks, others)
        _, seconds = measure(lambda: agree_on_settings({}, None, group))
        seconds -= group.outside_seconds
        self._note("settings", seconds=seconds, received_bytes=group.received_bytes)
        if self.ranks > NODE_RANKS:
            scheme = Scheme.parse("rs 4+2" if self.ranks >= 64 * 6 else "partner")
            domains = [f"node{rank // NODE_RANKS:05d}" for rank in range(self.ranks)]
            groups, seconds = measure(lambda: plan_groups(domains, scheme))
            self._note("groups", seconds=seconds)
            self._meeting(domains, groups)

    def _meeting(self, hosts: Sequence[str], groups: Groups) -> None:
        """The meeting of all nodes' agents at the start of a run."""

        def others(turn: int, own: Any) -> Iterator[Any]:
            address, *rest = own
            for rank in range(1, self.ranks):
                is_first = rank % NODE_RANKS == 0
                where = replace(address, port=address.port + rank // NODE_RANKS)
                yield where if is_first else None, *rest

        group: Any = OneOfMany(self.ranks, others)
        config = load_config({"path": "/tmp/none", "peer_redundancy": "partner"}, {})
        agent: Any = SilentAgent()
        nodes = JobTopology(tuple(hosts), tuple(hosts), tuple(hosts))
        setup = PeerSetup(config, group, nodes, agent, groups)
        run = "s" * 32, 3, ()
        _, seconds = measure(lambda: setup.meet(group, *run, lambda text: None))
        assert setup.ready
        seconds -= group.outside_seconds
        self._note("meeting", seconds=seconds, received_bytes=group.received_bytes)
        members = sum(len(each.hosts) - 1 for each in agent.introduced.parties)
        nbytes = sum(map(len, packets_of(agent.introduced)))
        self._note("agent", told_bytes=nbytes, links=members)

    def _look(self) -> JobHistory:
        """The inventory of a node, and the exchange of all inventories."""
        node = Node(self.ranks, self._folder)
        first, own_seconds = measure(node.look)
        nodes = all_nodes(first, self.ranks)
        group: Any = OneOfMany(self.ranks, exchanged(nodes, self.ranks))
        config = load_config({"path": str(self._folder / "none")}, {})
        history = JobHistory(config, group, node.job, node.store, node.host)
        gc.collect()
        _, seconds = measure(history.look)
        seconds -= group.outside_seconds + own_seconds
        self._note("inventories", seconds=seconds, received_bytes=group.received_bytes)
        history.parities = [nodes[r // NODE_RANKS].parities for r in range(self.ranks)]
        return history

    def _plan(self, history: JobHistory) -> None:
        """The plan of a restart: from memory, with other ranks, after the loss of a node."""
        found, parities, nodes = history.found, history.parities, history.nodes

        def plan(name: str, expected: int, *args: Any, **more: Any) -> None:
            with _process.collector_paused():  # as in a restart
                chosen, seconds = measure(lambda: plan_restore(*args, **more))
            assert chosen is not None
            assert chosen.id.version == expected, chosen.id
            self._note(name, seconds=seconds)

        plan("plan_memory", MEMORY[-1], found, parities=parities, nodes=nodes)
        # A node is gone with its memory and disk: the newest protected version is rebuilt.
        if self.ranks >= 4 * NODE_RANKS:
            left = slice(NODE_RANKS, None)
            lost = {"parities": parities[left], "nodes": nodes[left]}
            plan("plan_lost_node", LOCAL[-1], found[left], **lost)
        everywhere = self._persistent_copies()
        # Half as many ranks, and nothing but the persistent level.
        half = self.ranks // 2
        alone: list[Sequence[Found]] = [everywhere, *[()] * (half - 1)]
        plan("plan_half", 900, alone, nodes=[f"node{rank // 8}" for rank in range(half)])
        limit = VersionId(3, MEMORY[-1])
        with _process.collector_paused():
            _, seconds = measure(
                lambda: (
                    [
                        history.newest(level, limit)
                        for level in ("", "memory", "local", "persistent")
                    ],
                    history.newest_clean(limit, "local"),
                    history.once_complete(),
                    history.incomplete(),
                    history.metrics(),
                    history.remains(),
                )
            )
        self._note("history", seconds=seconds)

    def _persistent_copies(self) -> tuple[Found, ...]:
        """The copies of one version on the persistent level, as rank 0 finds them."""
        from tierckpt.core.restore_plan import EVERYWHERE, Location

        known, place = facts(self.ranks, 900), Location("persistent", EVERYWHERE, "/far")
        return tuple(Found(known.key(shard), place, known) for shard in range(self.ranks))

    def _layout(self) -> None:
        """The layout of a rank's shard."""
        specs = [
            TensorSpec(f"model/blocks.{n}.weight", "float32", (2500, 1000), None, 4)
            for n in range(TENSORS)
        ]
        middle = self.ranks // 2
        layout, seconds = measure(lambda: plan_layout(specs, [], middle, self.ranks))
        assert layout
        self._note("layout", seconds=seconds)

    def _retention(self) -> None:
        """Retention of a rank's shards on its disk."""
        held = [VersionId(3, 10 * number) for number in range(100)]
        policy = RetentionPolicy(keep_last=2, keep_every=100)
        _, seconds = measure(lambda: retirable(held, policy, held[-1], ((3, 0),)))
        self._note("retention", seconds=seconds)
        size = len(manifest(self.ranks, 900, 0).encode())
        self._note("manifest", bytes=float(size))

    def _flush(self) -> None:
        """A version on the persistent level: written node after node, listed, read, removed."""
        place = self._folder / "far"
        known = facts(self.ranks, 900)
        with closing(PersistentStore(str(place))) as store:
            store.create()
            requests: Any = CountedRequests(store.backend)
            store.backend = requests
            first = self._sources(0)
            _, seconds = measure(lambda: store.flush(known, IMAGE_BYTES, first))
            self._note("flush_first_node", seconds=seconds, requests=requests.take())
            nodes = -(-self.ranks // NODE_RANKS)
            for node in range(1, nodes - 1):
                store.flush(known, IMAGE_BYTES, self._sources(node))
            if nodes > 1:
                requests.take()
                last = self._sources(nodes - 1)
                _, seconds = measure(lambda: store.flush(known, IMAGE_BYTES, last))
                self._note("flush_last_node", seconds=seconds, requests=requests.take())
            assert store.exists(known.name)
            record = store.read_manifest(known.name).encode()
            self._note("version_manifest", bytes=len(record))
            files = [each for each in place.rglob("*") if each.is_file()]
            self._note("version", files=len(files))
            self._read(place, store)
            _, seconds = measure(lambda: store.retire(known.name))
            self._note("retire", seconds=seconds)

    def _sources(self, node: int) -> list[ShardSource]:
        image = memoryview(bytes(IMAGE_BYTES))
        ranks = range(NODE_RANKS * node, min(NODE_RANKS * (node + 1), self.ranks))
        return [ShardSource(r, image, manifest(self.ranks, 900, r).encode()) for r in ranks]

    def _read(self, place: Path, store: PersistentStore) -> None:
        """The looks of every rank at its own shard, and of a user."""
        known = facts(self.ranks, 900)
        _, seconds = measure(lambda: store.open_shard(known.name, self.ranks - 1))
        self._note("open_shard", seconds=seconds)
        for command, name in (("list", "list"), ("verify", "verify")):
            _, seconds = measure(lambda given=command: _command(given, str(place)))
            self._note(name, seconds=seconds)


def _command(name: str, place: str) -> None:
    """Run a command of `tierckpt`."""
    said = StringIO()
    with redirect_stdout(said):
        status = tierckpt([name, place])
    # The shards of this benchmark have no header: they are damaged to a reader.
    assert status in (0, 1, None), said.getvalue()


def main() -> None:
    parser = parser_of(
        __doc__,
        toy="few ranks, a few seconds",
        place="folder for the versions; default: the temporary one",
    )
    parser.add_argument("--worlds", default=",".join(map(str, WORLDS)), help="numbers of ranks")
    parser.add_argument("--plot", help="write a picture to this file")
    options = parser.parse_args()
    worlds = TOY_WORLDS if options.toy else map(int, options.worlds.split(","))
    place = options.dir or Path(tempfile.gettempdir())
    rows = []
    for ranks in worlds:
        with temporary(place) as folder:
            rows.append(World(ranks, folder).measure())
    publish(options.json, description(place), rows=rows)
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
