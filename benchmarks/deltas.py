"""How much does a version save as its difference to an earlier one?

    python benchmarks/deltas.py --toy
    python benchmarks/deltas.py --json deltas.json

A small transformer learns the bytes of Python's own library with AdamW. Late in the training its
weights and moments are compared with those 1, 10, 100 and 1000 steps before: each block is encoded
whole, as XOR with the earlier block, and as integer difference to it (as the codec `delta`), all
with byte planes and Zstandard. Then a whole version and a difference are loaded from a directory.
"""

from __future__ import annotations

import math
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tierckpt
import tierckpt.storage.persistent
from lib import machine
from lib.figures import spread
from lib.report import publish
from lib.terminal import parser_of
from tierckpt.codecs.codec import BlockId
from tierckpt.codecs.difference import difference, undone
from tierckpt.codecs.zstd import Zstd
from tierckpt.format.manifest import Buffer

BLOCK_BYTES = 512 * 1024
"""The block size of shards."""
LEVEL = 1
"""Of Zstandard."""
TEXT_BYTES = 8 << 20
KINDS = ("weights", "exp_avg", "exp_avg_sq", "weights, bfloat16")
Contents = dict[str, bytes]
Row = dict[str, Any]


# --- the training --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """The net and its training."""

    width: int = 192
    layers: int = 4
    tokens: int = 64
    batch: int = 8
    steps: int = 3500
    late: int = 2500
    """The step of the earlier version."""
    distances: tuple[int, ...] = (1, 10, 100, 1000)
    """Steps between two versions that are compared."""
    loaded: int = 100
    """The one of them of the difference that is loaded."""


TOY = Size(
    width=32,
    layers=1,
    tokens=16,
    batch=2,
    steps=100,
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


def trained(size: Size) -> Iterator[tuple[int, Contents]]:
    """Train, and yield the bytes of weights and moments at the steps that are compared."""
    wanted = {size.late + d for d in (0, *size.distances)}
    torch.manual_seed(0)
    data, net = text(), Net(size)
    adam = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1)
    warm = min(100, size.late)

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


Change = Callable[[Buffer, Buffer, int], Buffer]
"""A reversible change of a block by its base's, in integers of a size."""


def _whole(block: Buffer, base: Buffer, item_bytes: int) -> Buffer:
    return block


def _exclusive_or(block: Buffer, base: Buffer, item_bytes: int) -> Buffer:
    one, other = (np.frombuffer(each, f"u{item_bytes}") for each in (block, base))
    return np.bitwise_xor(one, other).data.cast("B")


WAYS: dict[str, tuple[Change, Change]] = {
    "whole": (_whole, _whole),
    "XOR": (_exclusive_or, _exclusive_or),
    "difference": (difference, undone),
}
"""There and back."""


def blocks(data: bytes) -> list[bytes]:
    """The blocks of a shard with this content."""
    return [data[low : low + BLOCK_BYTES] for low in range(0, len(data), BLOCK_BYTES)]


def sizes(size: Size, versions: dict[int, Contents]) -> Iterator[Row]:
    """Encode each kind of content in each way, and compare what comes back."""
    for kind, distance, way in product(KINDS, size.distances, WAYS):
        if way == "whole" and distance != size.distances[-1]:
            continue
        now, base = (versions[size.late + more][kind] for more in (distance, 0))
        yield {
            **{"phase": "late", "content": kind, "distance": distance, "way": way},
            **{"nbytes": len(now), "stored_bytes": _stored_bytes(way, kind, now, base)},
        }


def _stored_bytes(way: str, kind: str, now: bytes, base: bytes) -> int:
    item, zstd, (there, back) = 2 if "16" in kind else 4, Zstd(LEVEL), WAYS[way]
    where, total = BlockId("job", "run", 1, 1, 0, 1, 0, item), 0
    for block, before in zip(blocks(now), blocks(base), strict=True):
        stored = bytes(zstd.encode(there(block, before, item), where))
        total += len(stored)
        if bytes(back(zstd.decode(stored, where), before, item)) != block:
            raise RuntimeError(f"{way} does not restore {kind}")
    return total


# --- a restart -----------------------------------------------------------------------------------


def loads(size: Size, versions: dict[int, Contents], copies: int, rounds: int) -> list[Row]:
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


def _loaded(far: Path, state_bytes: int, rounds: int) -> list[Row]:
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
        {
            **{"version": text, "state_bytes": state_bytes, "stored_bytes": manifest.nbytes},
            **{"wall": asdict(spread(wall)), "cpu": asdict(spread(cpu))},
        }
        for text, manifest, wall, cpu in zip(
            ("whole", "difference"), manifests, walls, cpus, strict=True
        )
    ]


def main() -> None:
    parser = parser_of(__doc__, toy="a tiny net, 2 rounds")
    parser.add_argument("--rounds", type=int, help="loads of each version; default 5, toy 2")
    options = parser.parse_args()
    size = TOY if options.toy else Size()
    versions = dict(trained(size))
    torch.set_num_threads(1)
    rounds, copies = options.rounds or (2 if options.toy else 5), 1 if options.toy else 8
    ways = list(sizes(size, versions))
    loaded = loads(size, versions, copies, rounds)
    about = machine.description(Path.cwd())
    publish(options.json, about, ways=ways, loads=loaded, training=asdict(size))


if __name__ == "__main__":
    main()
