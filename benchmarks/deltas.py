"""How much does a version save as its difference to an earlier one?

    python benchmarks/deltas.py --toy
    python benchmarks/deltas.py --json deltas.json

A small transformer learns the bytes of Python's own library with AdamW. Early and late in the
training, its weights and moments are compared with those 1, 10, 100 and 1000 steps before: each
block is encoded whole, as XOR with the earlier block, and as integer difference to it, all with
byte planes and Zstandard. Then a whole version and a difference are loaded from a directory.
Speeds are per CPU-second, so that other load of the machine does not count.

*ratio* is size over stored size; *way* is `whole`, or `difference` (as the codec `delta`) or `XOR`
to the version *steps* before. `--versions FILE` keeps the training's states for a later run.
"""

from __future__ import annotations

import argparse
import math
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

import tierckpt
import tierckpt.storage.persistent
from lib import machine
from lib.figures import Spread, spread
from lib.files import write_json
from lib.limits import Cost, timed
from lib.report import align
from lib.terminal import parser_of
from tierckpt.codecs.codec import BlockId
from tierckpt.codecs.difference import difference, undone
from tierckpt.codecs.zstd import Zstd
from tierckpt.format.manifest import Buffer

BLOCK_BYTES = 512 * 1024
"""The block size of shards."""
PHASES = ("early", "late")
TEXT_BYTES = 8 << 20
KINDS = ("weights", "exp_avg", "exp_avg_sq", "weights, bfloat16")
Contents = dict[str, bytes]


# --- the training --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """The net and its training."""

    width: int = 192
    layers: int = 4
    tokens: int = 64
    batch: int = 8
    steps: int = 3500
    early: int = 300
    """The step of the earlier version, early in the training."""
    late: int = 2500
    distances: tuple[int, ...] = (1, 10, 100, 1000)
    """Steps between two versions that are compared."""
    loaded: int = 100
    """The one of them of the difference that is loaded."""

    def step_of(self, phase: str) -> int:
        """The step of the earlier version in this phase."""
        return {"early": self.early, "late": self.late}[phase]


TOY = Size(
    width=32,
    layers=1,
    tokens=16,
    batch=2,
    steps=100,
    early=20,
    late=60,
    distances=(1, 10),
    loaded=10,
)


class Net(torch.nn.Module):
    """A small GPT on bytes."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(256, size.width)
        self.place = torch.nn.Parameter(torch.zeros(size.tokens, size.width))
        self.layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(
                size.width, 4, 4 * size.width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(size.layers)
        )
        self.norm = torch.nn.LayerNorm(size.width)
        self.head = torch.nn.Linear(size.width, 256, bias=False)
        self.mask = torch.nn.Transformer.generate_square_subsequent_mask(size.tokens)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x) + self.place
        for layer in self.layers:
            h = layer(h, src_mask=self.mask, is_causal=True)
        return self.head(self.norm(h))


def text() -> torch.Tensor:
    """Bytes of Python's library."""
    found = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        found += path.read_bytes()
    return torch.frombuffer(found[:TEXT_BYTES], dtype=torch.uint8).long()


def trained(size: Size, phases: Sequence[str]) -> Iterator[tuple[int, Contents]]:
    """Train, and yield the bytes of weights and moments at the steps that are compared."""
    wanted = {size.step_of(phase) + d for phase in phases for d in (0, *size.distances)}
    torch.manual_seed(0)
    data, net = text(), Net(size)
    adam = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1)
    warm = min(100, size.early)

    def rate(step: int) -> float:
        share = max(step - warm, 0) / max(size.steps - warm, 1)
        return min((step + 1) / warm, 0.1 + 0.45 * (1 + math.cos(math.pi * share)))

    schedule = torch.optim.lr_scheduler.LambdaLR(adam, rate)
    for step in range(1, max(wanted) + 1):
        picked = torch.randint(len(data) - size.tokens - 1, (size.batch,))
        rows = torch.stack([data[i : i + size.tokens + 1] for i in picked])
        adam.zero_grad()
        out = net(rows[:, :-1])
        loss = torch.nn.functional.cross_entropy(out.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        adam.step()
        schedule.step()
        if step % 250 == 0:
            print(f"step {step}: loss {loss.item():.3f}", file=sys.stderr)
        if step in wanted:
            yield step, contents_of(net, adam)


def contents_of(net: torch.nn.Module, adam: torch.optim.Optimizer) -> Contents:
    """The bytes by kind, in the order of the parameters."""
    parameters = [p.detach() for p in net.parameters()]
    state = [adam.state[p] for p in net.parameters()]
    kinds = {
        "weights": parameters,
        "exp_avg": [each["exp_avg"] for each in state],
        "exp_avg_sq": [each["exp_avg_sq"] for each in state],
        "weights, bfloat16": [p.bfloat16() for p in parameters],
    }
    return {
        kind: b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors)
        for kind, tensors in kinds.items()
    }


# --- the ways ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """A reversible difference of a block and its base's, in integers of a size."""

    name: str
    there: Callable[[Buffer, Buffer, int], Buffer]
    back: Callable[[Buffer, Buffer, int], Buffer]


def _whole(block: Buffer, base: Buffer, item_bytes: int) -> Buffer:
    return block


def _exclusive_or(block: Buffer, base: Buffer, item_bytes: int) -> Buffer:
    one, other = (np.frombuffer(each, f"u{item_bytes}") for each in (block, base))
    return np.bitwise_xor(one, other).data.cast("B")


WAYS = (
    Way("whole", _whole, _whole),
    Way("XOR", _exclusive_or, _exclusive_or),
    Way("difference", difference, undone),
)


@dataclass
class Row:
    """One way for one kind of content. Speeds are bytes of content per CPU-second."""

    phase: str
    content: str
    distance: int
    way: str
    nbytes: int
    stored_bytes: int = 0
    there: Spread | None = None
    back: Spread | None = None
    speeds: tuple[list[float], list[float]] = field(
        default_factory=lambda: ([], []), repr=False, compare=False
    )


def blocks(data: bytes) -> list[bytes]:
    """The blocks of a shard with this content."""
    return [data[low : low + BLOCK_BYTES] for low in range(0, len(data), BLOCK_BYTES)]


def measure(
    size: Size, phases: Sequence[str], versions: dict[int, Contents], level: int, rounds: int
) -> list[Row]:
    """Alternate the ways, so that other load of the machine affects all of them equally."""
    jobs = [
        (Row(phase, kind, d, way.name, len(versions[at][kind])), way, at)
        for phase, at in ((phase, size.step_of(phase)) for phase in phases)
        for kind in KINDS
        for d in size.distances
        for way in WAYS
        if way.name != "whole" or d == size.distances[-1]
    ]
    zstd = Zstd(level)
    for number in range(rounds + 1):
        for row, way, at in jobs:
            pair = [versions[step][row.content] for step in (at + row.distance, at)]
            costs = _costs(row, way, zstd, *map(blocks, pair))
            for cost, speeds in zip(costs if number else (), row.speeds, strict=False):
                speeds.append(row.nbytes / max(cost.cpu_s, 1e-9))  # the first round warms up
    for row, _, _ in jobs:
        row.there, row.back = map(spread, row.speeds)
    return [row for row, _, _ in jobs]


def _costs(row: Row, way: Way, zstd: Zstd, now: list[bytes], base: list[bytes]) -> list[Cost]:
    """Encode and decode all blocks, and compare them."""
    item = 2 if "16" in row.content else 4
    where = BlockId("job", "run", 1, 1, 0, 1, 0, item)
    stored: list[bytes] = []
    found: list[Buffer] = []

    def encode() -> None:
        for block, before in zip(now, base, strict=True):
            stored.append(bytes(zstd.encode(way.there(block, before, item), where)))

    def decode() -> None:
        for each, before in zip(stored, base, strict=True):
            found.append(way.back(zstd.decode(each, where), before, item))

    costs = [timed(encode), timed(decode)]
    row.stored_bytes = sum(map(len, stored))
    if [*map(bytes, found)] != now:
        raise RuntimeError(f"{row.way} does not restore {row.content}")
    return costs


# --- a restart -----------------------------------------------------------------------------------


@dataclass
class Load:
    """How long it takes to load a version from a directory. In seconds."""

    version: str
    state_bytes: int
    stored_bytes: int
    wall: Spread | None = None
    cpu: Spread | None = None


def loads(size: Size, versions: dict[int, Contents], copies: int, rounds: int) -> list[Load]:
    """Store the late version and, as a difference to it, that of `size.loaded` steps later,
    `copies` times side by side; then load both by turns."""
    nbytes = len(versions[size.late]["weights"])
    model = torch.nn.ParameterList(torch.zeros(nbytes // 4) for _ in range(copies))
    adam = torch.optim.AdamW(model.parameters(), lr=0.0)
    with tempfile.TemporaryDirectory(prefix="deltas-") as folder:
        far = Path(folder) / "far"
        checkpointer = tierckpt.Checkpointer(
            model,
            adam,
            path=Path(folder) / "near",
            agent="inline",
            when_busy="wait",
            persistent_path=far,
            persistent_every_steps=1,
            persistent_keep="2, every 1",
            persistent_codecs="delta, zstd",
        )
        for step in (size.late, size.late + size.loaded):
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            adam.step()
            for p in model.parameters():
                for kind, tensor in (("weights", p.data), *adam.state[p].items()):
                    if kind in versions[step]:
                        data = bytearray(versions[step][kind])
                        tensor.copy_(torch.frombuffer(data, dtype=torch.float32))
            checkpointer.step()
            checkpointer.wait()
        checkpointer.close()
        return _loaded(far, 3 * nbytes * copies, rounds)


def _loaded(far: Path, state_bytes: int, rounds: int) -> list[Load]:
    store = tierckpt.storage.persistent.PersistentStore(str(far))
    names = store.versions()
    manifests = [store.read_manifest(name) for name in names]
    if [bool(each.bases) for each in manifests] != [False, True]:
        raise RuntimeError(f"{names} are not a whole version and a difference")
    walls, cpus = ([[], []] for _ in range(2))  # type: tuple[list[list[float]], list[list[float]]]
    for number in range(rounds + 1):
        for i, name in enumerate(names):
            begin, begin_cpu = time.perf_counter(), time.process_time()
            tierckpt.load(far, name.id.version, progress=False)
            if number:
                walls[i].append(time.perf_counter() - begin)
                cpus[i].append(time.process_time() - begin_cpu)
    return [
        Load(text, state_bytes, manifest.nbytes, spread(wall), spread(cpu))
        for text, manifest, wall, cpu in zip(
            ("whole", "difference"), manifests, walls, cpus, strict=True
        )
    ]


HEADERS = ("training", "content", "steps", "way", "MB", "ratio", "there, MB/CPU-s", "back")


def table(rows: list[Row]) -> str:
    """The table, one line per content, distance and way."""
    lines = []
    for row in rows:
        assert row.there
        assert row.back
        lines.append(
            (
                row.phase,
                row.content,
                "" if row.way == "whole" else str(row.distance),
                row.way,
                f"{row.nbytes / 1e6:.1f}",
                f"{row.nbytes / row.stored_bytes:.3f}",
                f"{row.there.median / 1e6:.0f}",
                f"{row.back.median / 1e6:.0f}",
            )
        )
    return align([HEADERS, *lines])


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__, toy="a tiny net, 2 rounds")
    parser.add_argument("--level", type=int, default=1, help="Zstandard's level; default 1")
    parser.add_argument("--rounds", type=int, help="turns of everything; default 5, toy 2")
    parser.add_argument(
        "--versions", type=Path, help="keep the trained states here, and reuse them"
    )
    text = "early, late or both; early alone needs a third of the training, and loads nothing"
    parser.add_argument("--phases", default=",".join(PHASES), help=f"{text}; default both")
    options = parser.parse_args()
    options.phases = options.phases.split(",")
    if not {*options.phases} <= {*PHASES}:
        parser.error(f"--phases are {' and '.join(PHASES)}")
    options.rounds = options.rounds or (2 if options.toy else 5)
    return options


def main() -> None:
    options = arguments()
    about = machine.description(Path.cwd())
    size = TOY if options.toy else Size()
    if options.versions and options.versions.exists():
        versions = torch.load(options.versions, weights_only=True)
    else:
        versions = dict(trained(size, options.phases))
        if options.versions:
            torch.save(versions, options.versions)
    torch.set_num_threads(1)
    rows = measure(size, options.phases, versions, options.level, options.rounds)
    copies = 1 if options.toy else 8
    loaded = loads(size, versions, copies, options.rounds) if "late" in options.phases else []
    print(
        f"{about['cpu']}, {about['cores']} cores; one thread, blocks of {BLOCK_BYTES >> 10} KiB, "
        f"zstd level={options.level}\n"
    )
    print(table(rows))
    for each in loaded:
        assert each.wall
        assert each.cpu
        print(
            f"load of {each.state_bytes / 1e6:.0f} MB, {each.version}: {each.wall.median:.3f} s, "
            f"{each.cpu.median:.3f} CPU-s, {each.stored_bytes / 1e6:.0f} MB stored"
        )
    if options.json:
        kept = [{k: v for k, v in asdict(row).items() if k != "speeds"} for row in rows]
        document = {**about, "block_bytes": BLOCK_BYTES, "level": options.level, "ways": kept}
        document["loads"] = [asdict(each) for each in loaded]
        document["training"] = asdict(size)
        write_json(options.json, document)
        print(f"figures: {options.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
