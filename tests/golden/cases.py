"""The golden cases: how each directory was written, and the restarts from it.

An archive and its expectations are never written again for a change of the product: they are what
an earlier Tierckpt left on someone's disk. A new case is a new entry here, and one run of
`python -m tests.golden.make NAME`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.golden.job import ALONE, DDP, HOROVOD

Actions = Sequence[tuple[Any, ...]]
Expected = tuple[int, int, dict[str, int]] | str


@dataclass(frozen=True)
class Run:
    """One run of the job."""

    actions: Actions
    ranks: int = 1
    adapter: str = ALONE
    settings: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Tool:
    """A command."""

    arguments: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Edit:
    """Changes to files, see `reading.change`."""

    edits: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Restart:
    """One restart from the directory, after changes to it."""

    name: str
    expects: Expected
    """Number of the run, version, and number of shards by level; or the error's name."""
    settings: Mapping[str, Any]
    ranks: int = 1
    adapter: str = ALONE
    edits: Sequence[Sequence[Any]] = ()
    call: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    then: str = ""
    equal: Sequence[str] = ()
    """Names of own state, equal with another number of ranks as well."""
    model: str = ""
    """Another model than the case's."""
    partly: bool = False
    """True if not the whole state comes back."""


@dataclass(frozen=True)
class Case:
    """A golden directory."""

    name: str
    why: str
    phases: Sequence[Run | Tool | Edit]
    restarts: Sequence[Restart]
    model: str = "plain"
    looks: Sequence[Sequence[str]] = (("@ROOT@/disk",),)
    """Paths of which commands are asked."""
    variables: Mapping[str, str] = field(default_factory=dict)
    look_variables: Mapping[str, str] = field(default_factory=dict)
    needs: Sequence[str] = ()
    """Packages without which nothing of the case is tested."""
    not_loaded: Sequence[int] = ()
    """Numbers of looks where no whole version can be read without a job."""


PLACES = {"path": "@ROOT@/disk", "shm_dir": "@SHM@", "job_id": "golden"}
OFTEN = {"local_every_steps": 2, "local_every_seconds": 0, "when_busy": "wait"}
WRITING = {**PLACES, **OFTEN}
READING = {**PLACES, "agent": "inline", "local_every_seconds": 0}
CONTINUING = {**READING, "local_every_steps": 1, "when_busy": "wait"}
MEMORY = {"TIERCKPT_JOB_ID": "golden"}
"""For commands: the job with the memory that they look for."""
SWITCHED_OFF = (("empty", "shm/"),)


def file(version: int, suffix: str, shard: int = 0, shards: int = 1, generation: int = 1) -> str:
    """A file of a version on the local level."""
    return f"v{version:010}.g{generation:06}.s{shard:05}of{shards:05}.{suffix}"


SHARD, MANIFEST = "safetensors", "manifest"
END = [("wait",), ("abandon",)]
"""As a killed job ends, with all its work on the disk done."""


def nodes(ranks: int, each: int = 1) -> dict[str, Any]:
    """Settings of a job with `each` ranks on a node, and a disk and a memory of its own there."""
    names = [f"n{rank // each}" for rank in range(ranks)]
    return {"path": "@ROOT@/disk/{node}", "node": names, "peer_interface": "lo"}


def disks(number: int) -> list[str]:
    return [f"@ROOT@/disk/n{node}" for node in range(number)]


DISK = "root/disk/"
SLOTS = "shm/*/golden/"

ONE_PROCESS = [
    Case(
        "alone",
        "one process: memory, and two versions on the disk",
        [Run([("train", 5), ("wait",), ("unfinished",), ("abandon",)], settings=WRITING)],
        [
            Restart("memory", (0, 5, {"memory": 1}), READING),
            Restart("local", (0, 4, {"local": 1}), READING, edits=SWITCHED_OFF),
            Restart("older", (0, 2, {"local": 1}), READING, call={"version": 2}),
            Restart("not there", "RestoreError", READING, call={"version": 3}),
            Restart("goes on", (0, 5, {"memory": 1}), CONTINUING, then="save"),
            Restart("on 2", (0, 5, {"memory": 1}), READING, 2, DDP),
            Restart(
                "damaged in memory",
                (0, 4, {"local": 1}),
                READING,
                edits=[("flip", SLOTS + "r00000.?", -3000)],
            ),
            Restart(
                "damaged head in memory",
                (0, 4, {"local": 1}),
                READING,
                edits=[("flip", SLOTS + "r00000.?", 40)],
            ),
            Restart(
                "one slot damaged",
                (0, 4, {"memory": 1}),
                READING,
                edits=[("flip", SLOTS + "r00000.0", -3000)],
            ),
            Restart(
                "the other slot damaged",
                (0, 5, {"memory": 1}),
                READING,
                edits=[("flip", SLOTS + "r00000.1", -3000)],
            ),
            Restart(
                "never sealed",
                (0, 4, {"local": 1}),
                READING,
                edits=[("set", SLOTS + "r00000.?", 16, [0] * 8)],
            ),
            Restart(
                "damaged data",
                (0, 2, {"local": 1}),
                READING,
                edits=[*SWITCHED_OFF, ("flip", DISK + file(4, SHARD), -3000)],
            ),
            Restart(
                "damaged header",
                (0, 2, {"local": 1}),
                READING,
                edits=[*SWITCHED_OFF, ("flip", DISK + file(4, SHARD), 100)],
            ),
            Restart(
                "damaged manifest",
                (0, 2, {"local": 1}),
                READING,
                edits=[*SWITCHED_OFF, ("flip", DISK + file(4, MANIFEST), 30)],
            ),
            Restart(
                "cut",
                (0, 2, {"local": 1}),
                READING,
                edits=[*SWITCHED_OFF, ("cut", DISK + file(4, SHARD), 4096)],
            ),
            Restart(
                "no manifest",
                (0, 2, {"local": 1}),
                READING,
                edits=[*SWITCHED_OFF, ("remove", DISK + file(4, MANIFEST))],
            ),
            Restart(
                "no shard",
                (0, 2, {"local": 1}),
                READING,
                edits=[*SWITCHED_OFF, ("remove", DISK + file(4, SHARD))],
            ),
            Restart(
                "all damaged",
                "RestoreError",
                READING,
                edits=[*SWITCHED_OFF, ("flip", DISK + "v*.safetensors", -3000)],
            ),
            Restart(
                "leftovers",
                (0, 4, {"local": 1}),
                READING,
                edits=[
                    *SWITCHED_OFF,
                    ("write", DISK + file(9, SHARD), "no data"),
                    ("write", DISK + ".unfinished", "no data"),
                ],
            ),
            Restart(
                "suspect",
                (0, 2, {"local": 1}),
                {**READING, "replicas": "stop"},
                edits=[
                    *SWITCHED_OFF,
                    ("write", DISK + "v0000000004.g000001.suspect", "replicas differ"),
                ],
            ),
            Restart(
                "suspect, but wanted",
                (0, 4, {"local": 1}),
                READING,
                edits=[
                    *SWITCHED_OFF,
                    ("write", DISK + "v0000000004.g000001.suspect", "replicas differ"),
                ],
            ),
        ],
        variables=MEMORY,
    ),
    Case(
        "moved",
        "a job without job_id, whose folder is at another place now",
        [
            Run(
                [("train", 4), *END],
                settings={"path": "@ROOT@/disk", "shm_dir": "@SHM@", **OFTEN},
            ),
            Edit(SWITCHED_OFF),
        ],
        [
            Restart(
                "local",
                (0, 4, {"local": 1}),
                {"path": "@ROOT@/disk", "shm_dir": "@SHM@", "agent": "inline"},
            )
        ],
    ),
    Case(
        "in_place",
        "the local level in memory: a slot is the file of the shard",
        [
            Run(
                [("train", 5), *END],
                settings={**WRITING, "path": "@SHM@/disk"},
            )
        ],
        [
            Restart(
                "memory",
                (0, 5, {"memory": 1}),
                {**READING, "path": "@SHM@/disk"},
            ),
            Restart(
                "local",
                (0, 4, {"local": 1}),
                {**READING, "path": "@SHM@/disk"},
                edits=[("remove", "shm/tierckpt-*")],
            ),
        ],
        looks=[["@SHM@/disk"]],
        variables=MEMORY,
    ),
    Case(
        "kinds",
        "many types of tensors and values, layouts, tied and frozen parameters, two optimizers",
        [Run([("train", 4), *END], settings=WRITING)],
        [
            Restart("memory", (0, 4, {"memory": 1}), READING),
            Restart("local", (0, 4, {"local": 1}), READING, edits=SWITCHED_OFF),
        ],
        model="kinds",
        variables=MEMORY,
    ),
    Case(
        "lbfgs",
        "lists of tensors in an optimizer's state",
        [Run([("train", 4), *END], settings=WRITING)],
        [Restart("local", (0, 4, {"local": 1}), READING, edits=SWITCHED_OFF)],
        model="lbfgs",
        variables=MEMORY,
    ),
    Case(
        "data",
        "a place in the data",
        [Run([("train", 5), *END], settings=WRITING)],
        [
            Restart("memory", (0, 5, {"memory": 1}), READING),
            Restart("local", (0, 4, {"local": 1}), READING, edits=SWITCHED_OFF),
        ],
        model="data",
        variables=MEMORY,
    ),
    Case(
        "routed_files",
        "files beside the tensors",
        [
            Run(
                [
                    ("train", 1),
                    ("files", {"index.bin": "first", "more/log.txt": "second"}),
                    ("train", 4),
                    *END,
                ],
                settings=WRITING,
            )
        ],
        [
            Restart("memory", (0, 5, {"memory": 1}), READING),
            Restart("local", (0, 4, {"local": 1}), READING, edits=SWITCHED_OFF),
        ],
        variables=MEMORY,
    ),
    Case(
        "accumulation",
        "iterations without a step: the number to go on with is larger than the version",
        [
            Run(
                [
                    ("train", 2),
                    ("plain_step",),
                    ("train", 1),
                    ("plain_step",),
                    ("train", 1),
                    *END,
                ],
                settings=WRITING,
            )
        ],
        [
            Restart("memory", (0, 4, {"memory": 1}), READING),
            Restart("local", (0, 2, {"local": 1}), READING, call={"version": 2}),
        ],
        variables=MEMORY,
    ),
    Case(
        "metric",
        "the best two are kept, and one is pinned",
        [
            Run(
                [
                    ("train", 5, [0.5, 0.2, 0.3, 0.9, 0.8]),
                    ("wait",),
                    ("pin", 4),
                    ("train", 4),
                    *END,
                ],
                settings={
                    **WRITING,
                    "local_every_steps": 1,
                    "local_keep": "1, best 2",
                },
            )
        ],
        [
            Restart("best", (0, 2, {"local": 1}), READING, call={"version": 2}),
            Restart("pinned", (0, 4, {"local": 1}), READING, call={"version": 4}),
            Restart(
                "kept on",
                (0, 9, {"local": 1}),
                {**CONTINUING, "local_keep": "1, best 1"},
                edits=SWITCHED_OFF,
                then="save 3",
            ),
        ],
        variables=MEMORY,
    ),
    Case(
        "runs",
        "three runs one after the other",
        [
            Run([("train", 3), *END], settings=WRITING),
            Run([("restore",), ("train", 3), *END], settings=WRITING),
            Run([("restore", {"version": 4}), ("train", 3), *END], settings=WRITING),
        ],
        [
            Restart("memory", (2, 7, {"memory": 1}), READING),
            Restart("local", (2, 6, {"local": 1}), READING, edits=SWITCHED_OFF),
            Restart(
                "given up",
                (1, 6, {"local": 1}),
                READING,
                call={"version": 6},
                edits=[*SWITCHED_OFF, ("remove", DISK + file(6, "*", generation=3))],
            ),
            Restart(
                "before the last run",
                (1, 4, {"local": 1}),
                READING,
                edits=[*SWITCHED_OFF, ("flip", DISK + file(6, SHARD, generation=3), -3000)],
            ),
        ],
        variables=MEMORY,
    ),
    Case(
        "ended",
        "a job that ended by itself",
        [Run([("train", 5), ("close",)], settings=WRITING)],
        [Restart("local", (0, 5, {"local": 1}), READING)],
        variables=MEMORY,
    ),
    Case(
        "rollback_asked",
        "a command asks the next start to go back",
        [
            Run([("train", 7), *END], settings={**WRITING, "local_keep": 3}),
            Tool(["rollback", "@ROOT@/disk", "4"]),
        ],
        [
            Restart("goes back", (0, 4, {"local": 1}), CONTINUING, then="save"),
            Restart("on 2", (0, 4, {"local": 1}), READING, 2, DDP),
        ],
        variables=MEMORY,
    ),
    Case(
        "rollback_done",
        "a run went back, and left nothing",
        [
            Run([("train", 7), *END], settings={**WRITING, "local_keep": 3}),
            Run([("restore",), ("abandon",)], settings={**WRITING, "rollback_to": 4}),
        ],
        [
            Restart("not again to the newest", (0, 4, {"local": 1}), READING),
            Restart(
                "the same order",
                (0, 4, {"local": 1}),
                {**CONTINUING, "rollback_to": 4},
                then="save",
            ),
        ],
        variables=MEMORY,
    ),
    Case(
        "rollback_over",
        "a run went back, and has newer versions",
        [
            Run([("train", 7), *END], settings={**WRITING, "local_keep": 4}),
            Run(
                [("restore",), ("train", 2), *END],
                settings={**WRITING, "rollback_to": 2, "local_keep": 4},
            ),
        ],
        [
            Restart("memory", (1, 4, {"memory": 1}), READING),
            Restart("local", (1, 4, {"local": 1}), READING, edits=SWITCHED_OFF),
            Restart(
                "the same order counts once",
                (1, 4, {"local": 1}),
                {**READING, "rollback_to": 2},
                edits=SWITCHED_OFF,
            ),
        ],
        variables=MEMORY,
    ),
    Case(
        "halt_asked",
        "a request to halt at a later version",
        [
            Run([("train", 5), *END], settings=WRITING),
            Tool(["halt", "@ROOT@/disk", "--after-version", "6", "--force"]),
        ],
        [
            Restart("halts", (0, 5, {"memory": 1}), READING, then="exit"),
            Restart(
                "cleared",
                (0, 5, {"memory": 1}),
                READING,
                edits=[("remove", DISK + "halt.json")],
                then="exit",
            ),
        ],
        variables=MEMORY,
    ),
    Case(
        "halted",
        "a job that was halted, and its request",
        [
            Run([("train", 5), *END], settings=WRITING),
            Tool(["halt", "@ROOT@/disk", "--now", "--force"]),
            Run([("restore",), ("until_exit",), ("close",)], settings=WRITING),
        ],
        [Restart("halts again", (1, 7, {"local": 1}), READING, then="exit")],
        variables=MEMORY,
    ),
]

SEVERAL_RANKS = [
    Case(
        "ddp2",
        "two ranks with DDP, on one node",
        [Run([("train", 5), *END], 2, DDP, WRITING)],
        [
            Restart("memory", (0, 5, {"memory": 2}), READING, 2, DDP),
            Restart("local", (0, 4, {"local": 2}), READING, 2, DDP, SWITCHED_OFF),
            Restart("on 1", (0, 5, {"memory": 2}), READING, 1, DDP),
            Restart("on 1, from disk", (0, 4, {"local": 2}), READING, 1, DDP, SWITCHED_OFF),
            Restart("on 3", (0, 4, {"local": 2}), READING, 3, DDP, SWITCHED_OFF),
            Restart("alone", (0, 5, {"memory": 2}), READING),
            Restart("by horovod", (0, 5, {"memory": 2}), READING, 2, HOROVOD),
            Restart(
                "a slot is lost",
                (0, 4, {"local": 1, "memory": 1}),
                READING,
                2,
                DDP,
                [("remove", SLOTS + "r00001.?")],
            ),
            Restart(
                "two levels",
                (0, 4, {"local": 1, "memory": 1}),
                READING,
                2,
                DDP,
                [("remove", SLOTS + "r00001.?"), ("flip", DISK + file(4, SHARD, 0, 2), -3000)],
            ),
            Restart(
                "damaged shard",
                (0, 2, {"local": 2}),
                READING,
                2,
                DDP,
                [*SWITCHED_OFF, ("flip", DISK + file(4, SHARD, 1, 2), -3000)],
            ),
        ],
        variables=MEMORY,
    ),
    Case(
        "ddp3",
        "three ranks with DDP, on one node",
        [Run([("train", 5), *END], 3, DDP, WRITING)],
        [
            Restart("memory", (0, 5, {"memory": 3}), READING, 3, DDP),
            Restart("local", (0, 4, {"local": 3}), READING, 3, DDP, SWITCHED_OFF),
            Restart("on 2", (0, 4, {"local": 3}), READING, 2, DDP, SWITCHED_OFF),
            Restart("on 4", (0, 5, {"memory": 3}), READING, 4, DDP),
        ],
        variables=MEMORY,
    ),
    Case(
        "ddp4",
        "four ranks with DDP, on one node",
        [Run([("train", 5), *END], 4, DDP, WRITING)],
        [
            Restart("memory", (0, 5, {"memory": 4}), READING, 4, DDP),
            Restart("local", (0, 4, {"local": 4}), READING, 4, DDP, SWITCHED_OFF),
            Restart("on 1", (0, 5, {"memory": 4}), READING),
            Restart("on 3", (0, 4, {"local": 4}), READING, 3, DDP, SWITCHED_OFF),
        ],
        variables=MEMORY,
    ),
    Case(
        "horovod2",
        "two ranks with Horovod, on one node",
        [Run([("train", 5), *END], 2, HOROVOD, WRITING)],
        [
            Restart("memory", (0, 5, {"memory": 2}), READING, 2, HOROVOD),
            Restart("local", (0, 4, {"local": 2}), READING, 2, HOROVOD, SWITCHED_OFF),
            Restart("by ddp", (0, 5, {"memory": 2}), READING, 2, DDP),
            Restart("alone", (0, 4, {"local": 2}), READING, edits=SWITCHED_OFF),
        ],
        variables=MEMORY,
    ),
    Case(
        "kinds2",
        "many types of tensors on two ranks",
        [Run([("train", 4), *END], 2, DDP, WRITING)],
        [
            Restart("memory", (0, 4, {"memory": 2}), READING, 2, DDP),
            Restart("on 1", (0, 4, {"local": 2}), READING, 1, DDP, SWITCHED_OFF),
        ],
        model="kinds",
        variables=MEMORY,
    ),
    Case(
        "other_numbers",
        "runs of two, three and one rank after each other",
        [
            Run([("train", 3), *END], 2, DDP, WRITING),
            Run([("restore",), ("train", 2), *END], 3, DDP, WRITING),
            Run([("restore",), ("train", 2), *END], 1, ALONE, WRITING),
        ],
        [
            Restart("memory", (2, 7, {"memory": 1}), READING),
            Restart("local", (2, 6, {"local": 1}), READING, 2, DDP, SWITCHED_OFF),
            Restart(
                "before the last run",
                (1, 4, {"local": 3}),
                READING,
                2,
                DDP,
                [*SWITCHED_OFF, ("flip", DISK + file(6, SHARD, generation=3), -3000)],
            ),
        ],
        variables=MEMORY,
    ),
    Case(
        "drifted",
        "replicas differed: versions are suspect",
        [
            Run(
                [("train", 4), ("tamper", 1), ("train", 4), *END],
                2,
                DDP,
                {**WRITING, "replicas": "warn every 1", "local_keep": 4},
            )
        ],
        [
            Restart(
                "stop",
                (0, 2, {"local": 2}),
                {**READING, "replicas": "stop"},
                2,
                DDP,
                SWITCHED_OFF,
            ),
        ],
        variables=MEMORY,
        not_loaded=(0,),
    ),
    Case(
        "rollback2",
        "a command asks two nodes to go back",
        [
            Run(
                [("train", 7), *END],
                2,
                DDP,
                {**WRITING, **nodes(2), "local_keep": 3},
            ),
            Edit(SWITCHED_OFF),
            Tool(["rollback", "@ROOT@/disk/n1", "4"]),
        ],
        [Restart("goes back", (0, 4, {"local": 2}), {**READING, **nodes(2)}, 2, DDP)],
        looks=[disks(2)],
        variables=MEMORY,
    ),
]


def protected(scheme: str, ranks: int, each: int = 1, **more: Any) -> Run:
    """A job with v3 and v5 protected by other nodes, and v6 in memory alone."""
    first = list(range(0, ranks, each))
    return Run(
        [
            ("train", 3),
            ("save",),
            ("reach_on", first, "peer", 3),
            ("meet",),
            ("train", 2),
            ("save",),
            ("reach_on", first, "peer", 5),
            ("meet",),
            ("train", 1),
            *END,
        ],
        ranks,
        DDP,
        {**WRITING, "local_every_steps": 100, **nodes(ranks, each), "peer_redundancy": scheme}
        | more,
    )


def rebuilding(scheme: str, ranks: int, each: int = 1, **more: Any) -> dict[str, Any]:
    return {
        **READING,
        "local_every_seconds": 60,
        **nodes(ranks, each),
        "peer_redundancy": scheme,
        **more,
    }


def lost(*numbers: int) -> list[tuple[Any, ...]]:
    """All nodes were switched off, and these have lost their disks."""
    return [*SWITCHED_OFF, *(("remove", f"root/disk/n{number}") for number in numbers)]


def of_peers(
    name: str,
    why: str,
    scheme: str,
    ranks: int,
    losses: Sequence[Sequence[int]],
    too_many: Sequence[Sequence[int]],
) -> Case:
    settings = rebuilding(scheme, ranks)
    restarts = [
        Restart(
            "lost " + " and ".join(map(str, each)),
            (0, 5, {"local": ranks - len(each), "peer": len(each)}),
            settings,
            ranks,
            DDP,
            lost(*each),
        )
        for each in losses
    ]
    return Case(
        name,
        why,
        [protected(scheme, ranks)],
        [
            Restart("memory", (0, 6, {"memory": ranks}), settings, ranks, DDP),
            Restart("local", (0, 5, {"local": ranks}), settings, ranks, DDP, SWITCHED_OFF),
            *restarts,
            Restart(
                "memory of one lost",
                (0, 5, {"local": 1, "memory": ranks - 1}),
                settings,
                ranks,
                DDP,
                [("remove", "shm/*/golden@n1")],
            ),
            *(
                Restart("too many lost", "RestoreError", settings, ranks, DDP, lost(*each))
                for each in too_many
            ),
            Restart(
                "damaged parity",
                (0, 5, {"local": ranks}),
                settings,
                ranks,
                DDP,
                [*SWITCHED_OFF, ("flip", "root/disk/n*/v0000000005.*.parity", 5000)],
            ),
            Restart(
                "lost, and damaged parity",
                (0, 3, {"local": ranks - len(losses[-1]), "peer": len(losses[-1])}),
                settings,
                ranks,
                DDP,
                [*lost(*losses[-1]), ("flip", "root/disk/n*/v0000000005.*.parity", 5000)],
            ),
            Restart(
                "damaged shard",
                (0, 5, {"local": ranks - 1, "peer": 1}),
                settings,
                ranks,
                DDP,
                [*SWITCHED_OFF, ("flip", "root/disk/n0/v0000000005.*.safetensors", -3000)],
            ),
        ],
        looks=[disks(ranks), disks(1)],
        variables=MEMORY,
    )


PEERS = [
    of_peers("partner2", "a copy on the other node", "partner", 2, [(0,), (1,)], ()),
    of_peers("partner3", "copies on two other nodes", "partner 2", 3, [(0,), (1, 2)], ()),
    of_peers("xor3", "parity by exclusive or", "xor", 3, [(0,), (1,), (2,)], [(0, 2)]),
    of_peers("rs4", "two of two by Reed-Solomon", "rs 2+2", 4, [(3,), (0, 1), (1, 3)], [(0, 1, 2)]),
    Case(
        "xor2x2",
        "two nodes of two ranks: two groups",
        [protected("xor", 4, 2)],
        [
            Restart("memory", (0, 6, {"memory": 4}), rebuilding("xor", 4, 2), 4, DDP),
            Restart(
                "lost 1",
                (0, 5, {"local": 2, "peer": 2}),
                rebuilding("xor", 4, 2),
                4,
                DDP,
                lost(1),
            ),
            Restart(
                "on the other node alone",
                (0, 5, {"local": 2, "peer": 2}),
                {**READING, **nodes(2, 2)},
                2,
                DDP,
                lost(1),
            ),
        ],
        looks=[disks(2), disks(1)],
        variables=MEMORY,
    ),
    Case(
        "xor4by2",
        "four nodes in groups of two",
        [protected("xor of 2", 4)],
        [
            Restart(
                f"one of each lost: {each[0]} and {each[1]}",
                (0, 5, {"local": 2, "peer": 2}),
                rebuilding("xor of 2", 4),
                4,
                DDP,
                lost(*each),
            )
            for each in [(0, 1), (2, 3)]
        ]
        + [
            Restart(
                "on 3",
                (0, 5, {"local": 3, "peer": 1}),
                {**READING, **nodes(3)},
                3,
                DDP,
                lost(3),
            ),
        ],
        looks=[disks(4)],
        variables=MEMORY,
    ),
    Case(
        "xor3_zstd",
        "encoded shards and parity, which is that of the plain ones",
        [protected("xor", 3, local_codecs="zstd")],
        [
            Restart(
                "lost 1",
                (0, 5, {"local": 2, "peer": 1}),
                rebuilding("xor", 3, local_codecs="zstd"),
                3,
                DDP,
                lost(1),
            ),
        ],
        looks=[disks(3)],
        variables=MEMORY,
    ),
]


def flushing(**more: Any) -> dict[str, Any]:
    """A job with a persistent directory, which has every second version."""
    return {
        **WRITING,
        "persistent_path": "@ROOT@/shared",
        "persistent_every_steps": 2,
        "persistent_every_seconds": 0,
        "slots": 3,
        **more,
    }


def shared(**more: Any) -> dict[str, Any]:
    return {**READING, "persistent_path": "@ROOT@/shared", **more}


NODES_LOST = [("remove", DISK), *SWITCHED_OFF]
"""Of all nodes, what they had."""
SHARED = "root/shared/"
RUN = [("train", 5), ("close",)]
HALF = [
    ("remove", SHARED + "v*.manifest"),
    ("remove", SHARED + "v*/*.group"),
    ("set", SHARED + "v*/*.shards", 0, [0] * 64),
]
"""The bytes of a shard are there; not its record, nor anything after that."""
SHARED_PATH = ["@ROOT@/shared"]

PERSISTENT = [
    Case(
        "shared1",
        "one process and a persistent directory",
        [Run(RUN, settings=flushing())],
        [
            Restart("local", (0, 5, {"local": 1}), shared()),
            Restart("persistent", (0, 5, {"persistent": 1}), shared(), edits=NODES_LOST),
            Restart("on 2", (0, 5, {"persistent": 1}), shared(), 2, DDP, NODES_LOST),
            Restart(
                "damaged local",
                (0, 5, {"persistent": 1}),
                shared(),
                edits=[("flip", DISK + file(5, SHARD), -3000)],
            ),
            Restart(
                "damaged data",
                (0, 4, {"persistent": 1}),
                shared(),
                edits=[*NODES_LOST, ("flip", SHARED + "v0000000005.*/*.shards", -3000)],
            ),
            Restart(
                "damaged group",
                (0, 4, {"persistent": 1}),
                shared(),
                edits=[*NODES_LOST, ("flip", SHARED + "v0000000005.*/*.group", 50)],
            ),
            Restart(
                "damaged manifest",
                (0, 4, {"persistent": 1}),
                shared(),
                edits=[*NODES_LOST, ("flip", SHARED + "v0000000005.*.manifest", 50)],
            ),
            Restart(
                "no manifest",
                (0, 4, {"persistent": 1}),
                shared(),
                edits=[*NODES_LOST, ("remove", SHARED + "v0000000005.*.manifest")],
            ),
            Restart(
                "no group",
                (0, 4, {"persistent": 1}),
                shared(),
                edits=[*NODES_LOST, ("remove", SHARED + "v0000000005.*/*.group")],
            ),
            Restart(
                "cut",
                (0, 4, {"persistent": 1}),
                shared(),
                edits=[*NODES_LOST, ("cut", SHARED + "v0000000005.*/*.shards", 4096)],
            ),
            Restart(
                "all damaged",
                "RestoreError",
                shared(),
                edits=[*NODES_LOST, ("flip", SHARED + "v*/*.shards", -3000)],
            ),
            Restart(
                "goes on",
                (0, 5, {"persistent": 1}),
                {**CONTINUING, **flushing(persistent_every_steps=1), "agent": "inline"},
                edits=NODES_LOST,
                then="save",
            ),
        ],
        looks=[["@ROOT@/disk"], SHARED_PATH, ["@ROOT@/disk", "@ROOT@/shared"]],
    ),
    Case(
        "shared2",
        "two ranks, a file for each shard",  # as a setting wanted it that is gone
        [Run(RUN, 2, DDP, flushing())],
        [
            Restart("persistent", (0, 5, {"persistent": 2}), shared(), 2, DDP, NODES_LOST),
            Restart("on 1", (0, 5, {"persistent": 2}), shared(), edits=NODES_LOST),
            Restart("on 3", (0, 5, {"persistent": 2}), shared(), 3, DDP, NODES_LOST),
            Restart("by horovod", (0, 5, {"persistent": 2}), shared(), 2, HOROVOD, NODES_LOST),
            Restart(
                "one shard lost",
                (0, 5, {"local": 1, "persistent": 1}),
                shared(),
                2,
                DDP,
                [("remove", DISK + file(5, "*", 1, 2))],
            ),
            Restart(
                "one file damaged",
                (0, 4, {"persistent": 2}),
                shared(),
                2,
                DDP,
                [*NODES_LOST, ("flip", SHARED + "v0000000005.*/00001of00002.shards", -3000)],
            ),
        ],
        looks=[SHARED_PATH],
    ),
    Case(
        "shared3",
        "three ranks of Horovod in one file",
        [Run(RUN, 3, HOROVOD, flushing())],
        [
            Restart("on 2", (0, 5, {"persistent": 3}), shared(), 2, DDP, NODES_LOST),
            Restart("on 3", (0, 5, {"persistent": 3}), shared(), 3, DDP, NODES_LOST),
        ],
        looks=[SHARED_PATH],
    ),
    Case(
        "shared4",
        "four ranks on two nodes, two shards in a file",  # by the same setting
        [Run(RUN, 4, DDP, {**flushing(), **nodes(4, 2)})],
        [
            Restart(
                "persistent",
                (0, 5, {"persistent": 4}),
                {**shared(), **nodes(4, 2)},
                4,
                DDP,
                NODES_LOST,
            ),
            Restart(
                "a node is lost",
                (0, 5, {"local": 2, "persistent": 2}),
                {**shared(), **nodes(4, 2)},
                4,
                DDP,
                lost(0),
            ),
            Restart("on 1", (0, 5, {"persistent": 4}), shared(), edits=NODES_LOST),
        ],
        looks=[SHARED_PATH],
    ),
    Case(
        "own_files",
        "each writer has its own file, as on NFS",
        [
            Run(
                RUN,
                4,
                DDP,
                {
                    **flushing(persistent_storage_options={"shared_writes": False}),
                    **nodes(4, 2),
                },
            )
        ],
        [
            Restart(
                "persistent",
                (0, 5, {"persistent": 4}),
                {**shared(), **nodes(4, 2)},
                4,
                DDP,
                NODES_LOST,
            ),
            Restart("on 1", (0, 5, {"persistent": 4}), shared(), edits=NODES_LOST),
            Restart(
                "one file damaged",
                (0, 4, {"persistent": 4}),
                shared(),
                2,
                DDP,
                [*NODES_LOST, ("flip", SHARED + "v0000000005.*/*/s00002-00003.shards", 9000)],
            ),
        ],
        looks=[SHARED_PATH],
    ),
    Case(
        "shared_kept",
        "many versions: some kept, one pinned there",
        [
            Run(
                [
                    ("train", 3),
                    ("save",),
                    ("pin", 3),
                    *[("train", 1), ("wait",)] * 6,
                    ("close",),
                ],
                settings=flushing(persistent_every_steps=1, persistent_keep="1, every 4"),
            )
        ],
        [
            Restart("newest", (0, 9, {"persistent": 1}), shared(), edits=NODES_LOST),
            Restart(
                "pinned",
                (0, 3, {"persistent": 1}),
                shared(),
                edits=NODES_LOST,
                call={"version": 3},
            ),
            Restart(
                "kept",
                (0, 4, {"persistent": 1}),
                shared(),
                edits=NODES_LOST,
                call={"version": 4},
            ),
        ],
        looks=[SHARED_PATH],
    ),
    Case(
        "half_flushed",
        "a flush that did not reach its end, or a removal",
        [
            Run(
                [("train", 4), ("close",)],
                settings=flushing(persistent_every_steps=4),
            ),
        ],
        [
            Restart(
                "no manifest yet",
                (0, 4, {"local": 1}),
                shared(),
                edits=[
                    *SWITCHED_OFF,
                    ("remove", SHARED + "v*.manifest"),
                ],
            ),
            Restart(
                "a later flush",
                (0, 4, {"local": 1}),
                {**flushing(persistent_every_steps=1, local_every_steps=1), "agent": "inline"},
                edits=[*SWITCHED_OFF, *HALF],
                then="save",
            ),
            Restart(
                "half of it",
                (0, 4, {"local": 1}),
                shared(),
                edits=[*SWITCHED_OFF, *HALF],
            ),
            Restart(
                "nothing else",
                (0, 0, {}),
                shared(),
                edits=[*NODES_LOST, ("remove", SHARED + "v*.manifest")],
                partly=True,
            ),
            Restart(
                "being removed",
                (0, 0, {}),
                shared(),
                edits=[*NODES_LOST, ("rename", SHARED + "v*.manifest", "v9.retired")],
                partly=True,
            ),
        ],
        looks=[["@ROOT@/disk", "@ROOT@/shared"]],
    ),
]

KEY, OTHER_KEY = 64 * "a", 64 * "b"
SECRET = {"TIERCKPT_ENCRYPTION_KEY": KEY}


def coded(name: str, why: str, codecs: str, model: str = "plain", **variables: str) -> Case:
    """A case of `local_codecs`."""
    settings = {**WRITING, "local_codecs": codecs}
    damaged = ("flip", DISK + file(4, "encoded"), 900)
    secret = []
    if "aes" in codecs:
        secret = [
            Restart(
                "another key",
                "RestoreError",
                {**READING, "local_codecs": codecs},
                edits=SWITCHED_OFF,
                variables={"TIERCKPT_ENCRYPTION_KEY": OTHER_KEY},
            ),
        ]
    return Case(
        name,
        why,
        [Run([("train", 5), *END], settings=settings, variables=variables)],
        [
            Restart("memory", (0, 5, {"memory": 1}), READING),
            Restart("local", (0, 4, {"local": 1}), READING, edits=SWITCHED_OFF),
            Restart("on 2", (0, 4, {"local": 1}), READING, 2, DDP, SWITCHED_OFF),
            Restart("damaged", (0, 2, {"local": 1}), READING, edits=[*SWITCHED_OFF, damaged]),
            *secret,
        ],
        model=model,
        variables={**MEMORY, **variables},
    )


CODECS = [
    coded("zstd", "compressed", "zstd level=1"),
    coded("aes", "encrypted", "aes-gcm", **SECRET),
    coded("zstd_aes", "compressed and encrypted", "zstd level=3, aes-gcm", **SECRET),
    Case(
        "incremental",
        "unchanged blocks refer to an earlier version",
        [
            Run(
                [*[("train", 1), ("save",)] * 6, *END],
                settings={
                    **WRITING,
                    "local_every_steps": 100,
                    "local_codecs": "incremental full_every=4, zstd, aes-gcm",
                    "local_keep": 3,
                },
                variables=SECRET,
            ),
            Edit(SWITCHED_OFF),
        ],
        [
            Restart("local", (0, 6, {"local": 1}), READING, edits=SWITCHED_OFF),
            Restart("older", (0, 5, {"local": 1}), READING, call={"version": 5}),
            Restart("on 2", (0, 6, {"local": 1}), READING, 2, DDP),
            Restart(
                "damaged base",
                (0, 4, {"local": 1}),
                READING,
                edits=[
                    *(("flip", DISK + file(5, "encoded"), at) for at in range(700, 10000, 100)),
                ],
            ),
            Restart(
                "no base",
                (0, 4, {"local": 1}),
                READING,
                edits=[("remove", DISK + file(5, "*"))],
            ),
        ],
        model="wide",
        variables={**MEMORY, **SECRET},
    ),
    Case(
        "delta",
        "kept versions are differences to an earlier one",
        [
            Run(
                [*[("train", 1), ("wait",)] * 6, ("close",)],
                2,
                DDP,
                flushing(
                    persistent_every_steps=1,
                    persistent_keep="2, every 1",
                    persistent_codecs="delta full_every=4, zstd",
                ),
            )
        ],
        [
            Restart("newest", (0, 6, {"persistent": 2}), shared(), 2, DDP, NODES_LOST),
            Restart("on 1", (0, 6, {"persistent": 2}), shared(), edits=NODES_LOST),
            Restart(
                "older",
                (0, 3, {"persistent": 2}),
                shared(),
                edits=NODES_LOST,
                call={"version": 3},
            ),
        ],
        model="wide",
        looks=[SHARED_PATH],
    ),
    Case(
        "shared_aes",
        "encrypted on the persistent level alone",
        [
            Run(
                RUN,
                2,
                DDP,
                flushing(persistent_codecs="incremental, zstd, aes-gcm"),
                SECRET,
            )
        ],
        [
            Restart("persistent", (0, 5, {"persistent": 2}), shared(), 2, DDP, NODES_LOST),
            Restart(
                "another key",
                "RestoreError",
                shared(),
                2,
                DDP,
                NODES_LOST,
                variables={"TIERCKPT_ENCRYPTION_KEY": OTHER_KEY},
            ),
        ],
        variables=SECRET,
        looks=[SHARED_PATH],
    ),
]


JOURNAL = {"local_journal_steps": 100, "memory_every_steps": 0}
RECORDED = [("train", 3), ("save",), ("train", 4), *END]
"""v3 is on the disk, and four steps after it are in the journal alone."""
REPEATED = "root/disk/journal/*s00000*"


def journal_restarts(ranks: int, adapter: str) -> list[Restart]:
    reading = {**READING, **JOURNAL}
    levels = {"local": ranks}
    return [
        Restart("repeated", (0, 7, levels), reading, ranks, adapter),
        Restart("without the setting", (0, 3, levels), READING, ranks, adapter),
        Restart("on 3", (0, 3, levels), reading, 3, DDP),
        Restart(
            "the last record is torn",
            (0, 6, levels),
            reading,
            ranks,
            adapter,
            [("cut", REPEATED, 4096)],
        ),
        Restart(
            "a record is damaged",
            (0, 3, levels),
            reading,
            ranks,
            adapter,
            [("flip", REPEATED, 100)],
        ),
        Restart(
            "a gradient is damaged",
            (0, 3, levels),
            reading,
            ranks,
            adapter,
            [("flip", REPEATED, 8192 + 4)],
        ),
        Restart(
            "the last bytes are damaged",
            (0, 6, levels),
            reading,
            ranks,
            adapter,
            [("flip", REPEATED, -1)],
        ),
        Restart("no journal", (0, 3, levels), reading, ranks, adapter, [("remove", REPEATED)]),
    ]


JOURNALS = [
    Case(
        "journal1",
        "steps that only the journal has, of one process",
        [
            Run(RECORDED, settings={**WRITING, **JOURNAL, "local_every_steps": 100}),
            Edit(SWITCHED_OFF),
        ],
        journal_restarts(1, ALONE),
        model="exactly",
    ),
    Case(
        "journal2",
        "steps that only the journals of two ranks have",
        [
            Run(RECORDED, 2, DDP, {**WRITING, **JOURNAL, "local_every_steps": 100}),
            Edit(SWITCHED_OFF),
        ],
        journal_restarts(2, DDP),
        model="exactly",
    ),
    Case(
        "journal_horovod",
        "the same with Horovod",
        [
            Run(RECORDED, 2, HOROVOD, {**WRITING, **JOURNAL, "local_every_steps": 100}),
            Edit(SWITCHED_OFF),
        ],
        [
            Restart("repeated", (0, 7, {"local": 2}), {**READING, **JOURNAL}, 2, HOROVOD),
            Restart("by ddp", (0, 7, {"local": 2}), {**READING, **JOURNAL}, 2, DDP),
        ],
        model="exactly",
    ),
    Case(
        "journal_copies",
        "two nodes, each with a copy of the other's journal",
        [
            Run(
                [
                    ("train", 3),
                    ("save",),
                    ("reach", "peer", 3),
                    ("meet",),
                    ("train", 4),
                    ("wait",),
                    ("meet",),
                    ("abandon",),
                ],
                2,
                DDP,
                {
                    **WRITING,
                    **JOURNAL,
                    **nodes(2),
                    "local_every_steps": 100,
                    "peer_redundancy": "partner",
                },
            ),
            Edit(SWITCHED_OFF),
        ],
        [
            Restart(
                name,
                (0, 7, levels),
                {**rebuilding("partner", 2), **JOURNAL},
                2,
                DDP,
                edits,
            )
            for name, levels, edits in [
                ("none lost", {"local": 2}, []),
                ("lost 0", {"local": 1, "peer": 1}, [("remove", "root/disk/n0")]),
                ("lost 1", {"local": 1, "peer": 1}, [("remove", "root/disk/n1")]),
            ]
        ],
        model="exactly",
        looks=[disks(2), disks(1)],
        not_loaded=[1],
    ),
]

FORK = {"path": "@ROOT@/fork", "shm_dir": "@SHM@", "job_id": "golden-fork"}
FORK_READING = {**READING, **FORK}
SOURCE_RUN = Run([("train", 5), *END], settings=WRITING)
BOTH = [["@ROOT@/disk"], ["@ROOT@/fork"]]

FORKS = [
    Case(
        "fork_ordered",
        "a command orders a fork; links to the files are beside it",
        [SOURCE_RUN, Tool(["fork", "@ROOT@/disk@v4", "@ROOT@/fork"]), Edit(SWITCHED_OFF)],
        [
            Restart("begins", (0, 4, {"local": 1}), FORK_READING),
            Restart("on 2", (0, 4, {"local": 1}), FORK_READING, 2, DDP),
            Restart(
                "the source is gone",
                (0, 4, {"local": 1}),
                {**CONTINUING, **FORK},
                edits=[("remove", "root/disk")],
            ),
            Restart(
                "the source keeps it",
                (0, 4, {"local": 1}),
                {**CONTINUING, "local_keep": 1},
                then="save 3",
            ),
            Restart(
                "goes on",
                (0, 4, {"local": 1}),
                {**CONTINUING, **FORK},
                then="save",
            ),
        ],
        looks=BOTH,
        not_loaded=[1],
    ),
    Case(
        "fork_cancelled",
        "an order that was taken back",
        [
            SOURCE_RUN,
            Tool(["fork", "@ROOT@/disk@v4", "@ROOT@/fork"]),
            Tool(["fork", "--cancel", "@ROOT@/fork"]),
        ],
        [
            Restart("a fresh start", (0, 0, {}), FORK_READING, partly=True),
            Restart("the source", (0, 5, {"memory": 1}), READING),
        ],
        variables=MEMORY,
    ),
    Case(
        "fork_began",
        "a fork that was killed before its first step",
        [
            SOURCE_RUN,
            Edit(SWITCHED_OFF),
            Run(
                [("restore", {"fork_from": "@ROOT@/disk@v4"}), ("abandon",)],
                settings={**WRITING, **FORK},
            ),
        ],
        [
            Restart("begins", (0, 4, {"local": 1}), FORK_READING),
            Restart(
                "another order needs the first one's end",
                "RestoreError",
                {**FORK_READING, "fork_from": "@ROOT@/disk@v2"},
            ),
        ],
        looks=BOTH,
        not_loaded=[1],
    ),
    Case(
        "fork_own",
        "a fork with versions of its own, and its source",
        [
            SOURCE_RUN,
            Edit(SWITCHED_OFF),
            Run(
                [("restore", {"fork_from": "@ROOT@/disk@v4"}), ("train", 3), *END],
                settings={**WRITING, **FORK},
            ),
        ],
        [
            Restart("memory", (1, 7, {"memory": 1}), FORK_READING),
            Restart(
                "local",
                (1, 6, {"local": 1}),
                {**FORK_READING, "fork_from": "@ROOT@/disk@v4"},
                edits=[*SWITCHED_OFF, ("remove", "root/disk")],
            ),
            Restart("the source", (0, 4, {"local": 1}), READING),
        ],
        looks=BOTH,
    ),
    Case(
        "fork_shared2",
        "a fork of a version on the persistent level, of two ranks",
        [
            Run(RUN, 2, DDP, flushing()),
            Edit(NODES_LOST),
            Run(
                [("restore", {"fork_from": "@ROOT@/shared"}), ("abandon",)],
                2,
                DDP,
                {**WRITING, **FORK},
            ),
        ],
        [
            Restart("begins", (0, 5, {"persistent": 2}), FORK_READING, 2, DDP),
            Restart("on 1", (0, 5, {"persistent": 2}), FORK_READING),
        ],
        looks=[SHARED_PATH, ["@ROOT@/fork"]],
        not_loaded=[1],
    ),
    Case(
        "parts",
        "a source of parts",
        [SOURCE_RUN, Edit(SWITCHED_OFF)],
        [
            Restart(
                "its model",
                (0, 0, {}),
                FORK_READING,
                call={"fork_from": "@ROOT@/disk", "only": "model"},
                partly=True,
            ),
            Restart(
                "two parts, by another name",
                (0, 0, {}),
                FORK_READING,
                call={
                    "fork_from": "@ROOT@/disk@v2",
                    "only": ["model", "optimizer"],
                    "map": {"*": "*"},
                },
                partly=True,
            ),
        ],
    ),
]

OTHERS = [
    Case(
        "files",
        "versions of files of a program without tensors",
        [
            Run(
                [
                    ("write", 1, {"a.txt": "one", "more/b.bin": "two"}),
                    ("write", 2, {"a.txt": "three", "more/b.bin": ""}),
                    ("write", 3, {"a.txt": "four"}),
                ],
                settings={**WRITING, "local_every_steps": 1},
            )
        ],
        [
            Restart("memory", (0, 3, {"memory": 1}), READING),
            Restart(
                "local",
                (0, 2, {"local": 1}),
                READING,
                edits=[*SWITCHED_OFF, ("flip", DISK + file(3, SHARD), -4000)],
            ),
        ],
        model="files",
        variables=MEMORY,
        not_loaded=[0],
    ),
    Case(
        "imported",
        "a file of torch.save that was imported",
        [
            Run([("train", 3), ("torch_save", "@ROOT@/saved.pt"), ("abandon",)], settings=WRITING),
            Tool(["import", "@ROOT@/saved.pt", "@ROOT@/imported", "--iteration", "3"]),
            Edit([*NODES_LOST, ("remove", "root/saved.pt")]),
        ],
        [
            Restart(
                "begins",
                (0, 3, {"local": 1}),
                {**READING, "path": "@ROOT@/imported"},
                partly=True,
            ),
            Restart(
                "on 2",
                (0, 3, {"local": 1}),
                {**READING, "path": "@ROOT@/imported"},
                2,
                DDP,
                partly=True,
            ),
        ],
        looks=[["@ROOT@/imported"]],
    ),
    Case(
        "objects",
        "the layout of object stores, in a directory that fsspec shows as a store",
        [
            Run(
                RUN,
                2,
                DDP,
                flushing(
                    persistent_path="local://@ROOT@/shared",
                    persistent_storage_options={"auto_mkdir": True},
                ),
            )
        ],
        [
            Restart(
                "persistent",
                (0, 5, {"persistent": 2}),
                shared(persistent_path="local://@ROOT@/shared"),
                2,
                DDP,
                NODES_LOST,
            ),
            Restart(
                "on 1",
                (0, 5, {"persistent": 2}),
                shared(persistent_path="local://@ROOT@/shared"),
                edits=NODES_LOST,
            ),
            Restart(
                "damaged",
                (0, 4, {"persistent": 2}),
                shared(persistent_path="local://@ROOT@/shared"),
                edits=[*NODES_LOST, ("flip", SHARED + "v0000000005.*/*/*.shards", 9000)],
            ),
            Restart("as a directory", (0, 5, {"persistent": 2}), shared(), edits=NODES_LOST),
        ],
        looks=[["local://@ROOT@/shared"]],
        needs=["fsspec"],
    ),
]

CASES = [
    *ONE_PROCESS,
    *SEVERAL_RANKS,
    *PEERS,
    *PERSISTENT,
    *CODECS,
    *JOURNALS,
    *FORKS,
    *OTHERS,
]
