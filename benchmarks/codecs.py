"""How much do codecs compress real weights and Adam moments, and how fast are they?

    python benchmarks/codecs.py --toy
    python benchmarks/codecs.py --json codecs.json

A small net is trained on scikit-learn's digits for a few hundred steps. Each codec then encodes
and decodes its weights and moments block by block, on one thread. blosc2 is compared where it is
installed. Speeds are per CPU-second, so that other load of the machine does not count.

ratio          bytes before over bytes after; every byte is compared once
there, back    encoding and decoding, GB (before) per CPU-second, median and range of the rounds
of memcpy      speed of encoding over that of a copy
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import xxhash
from sklearn.datasets import load_digits

from lib import machine
from lib.figures import Spread, spread
from lib.files import write_json
from lib.limits import timed
from lib.report import align
from lib.terminal import parser_of
from tierckpt.codecs.aes_gcm import FILE_VARIABLE, KEY_VARIABLE
from tierckpt.codecs.codec import BlockId, Codec, CodecError, make_codec
from tierckpt.format.manifest import Buffer

BLOCK_BYTES = 512 * 1024
"""The block size of shards."""
SETTINGS = (
    "zstd level=-5",
    "zstd level=-1",
    "zstd level=1",
    "zstd level=3",
    "zstd level=9",
    "aes-gcm",
)
Way = Callable[[Buffer], Buffer]


@dataclass
class Row:
    """One codec on one kind of content. Speeds are bytes of content per CPU-second."""

    content: str
    way: str
    nbytes: int
    stored_bytes: int = 0
    there: Spread | None = None
    back: Spread | None = None
    speeds: tuple[list[float], list[float]] = field(
        default_factory=lambda: ([], []), repr=False, compare=False
    )


@dataclass(frozen=True)
class Both:
    """A codec under its name in the table."""

    name: str
    encode: Way
    decode: Way


def trained(hidden: int, steps: int) -> dict[str, bytes]:
    """Train a net; return the bytes of its weights and Adam moments, by kind."""
    torch.manual_seed(0)
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    net = torch.nn.Sequential(
        torch.nn.Linear(64, hidden),
        torch.nn.ReLU(),
        torch.nn.Linear(hidden, hidden),
        torch.nn.ReLU(),
        torch.nn.Linear(hidden, 10),
    )
    adam = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(steps):
        picked = torch.randint(len(x), (64,))
        adam.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x[picked]), y[picked])
        loss.backward()
        adam.step()
    print(f"trained for {steps} steps, loss {loss.item():.4f}", file=sys.stderr)
    parameters = [p.detach() for p in net.parameters()]
    kinds = {
        "weights, float32": parameters,
        "exp_avg, float32": [adam.state[p]["exp_avg"] for p in net.parameters()],
        "exp_avg_sq, float32": [adam.state[p]["exp_avg_sq"] for p in net.parameters()],
        "weights, bfloat16": [p.bfloat16() for p in parameters],
    }
    return {
        kind: b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors)
        for kind, tensors in kinds.items()
    }


def ways(item_bytes: int) -> Iterator[Both]:
    """All codecs for items of this size, and a copy and a hash for comparison."""
    room = bytearray(BLOCK_BYTES)

    def copy(block: Buffer) -> Buffer:
        room[: len(block)] = block
        return block

    def hashed(block: Buffer) -> Buffer:
        xxhash.xxh3_128_digest(block)
        return block

    yield Both("memcpy", copy, copy)
    yield Both("incremental (xxh3_128)", hashed, copy)
    for setting in SETTINGS:
        name, _, parameter = setting.partition(" level=")
        try:
            codec = make_codec(name, {"level": int(parameter)} if parameter else {})
        except CodecError as error:
            print(f"not measured: {error}", file=sys.stderr)
            continue
        yield _both(setting, codec, item_bytes)
        if parameter == "1":
            yield _both(f"{setting}, not shuffled", codec, 1)
    yield from _blosc2(item_bytes)


def _both(name: str, codec: Codec, item_bytes: int) -> Both:
    where = BlockId("job", "run", 1, 1, 0, 1, 0, item_bytes)
    return Both(name, lambda b: codec.encode(b, where), lambda b: codec.decode(b, where))


def _blosc2(item_bytes: int) -> Iterator[Both]:
    try:
        import blosc2
    except ImportError:
        return
    for filter_ in (blosc2.Filter.SHUFFLE, blosc2.Filter.BITSHUFFLE):
        for level in (1, 5):
            options = {
                "codec": blosc2.Codec.ZSTD,
                "clevel": level,
                "typesize": item_bytes,
                "filters": [filter_],
                "filters_meta": [0],
                "nthreads": 1,
            }

            def encode(block: Buffer, options=options) -> Buffer:  # type: ignore[no-untyped-def]
                return blosc2.compress2(block, **options)  # type: ignore[no-any-return]

            def decode(block: Buffer) -> Buffer:
                return blosc2.decompress2(block, nthreads=1)  # type: ignore[no-any-return]

            yield Both(f"blosc2 {filter_.name.lower()}, zstd {level}", encode, decode)


def measure(contents: dict[str, bytes], rounds: int) -> list[Row]:
    """Alternate the codecs, so that other load of the machine affects all of them equally."""
    pairs = []
    for content, data in contents.items():
        blocks = [data[low : low + BLOCK_BYTES] for low in range(0, len(data), BLOCK_BYTES)]
        for both in ways(2 if "16" in content else 4):
            pairs.append((Row(content, both.name, len(data)), both, blocks))
    for number in range(rounds + 1):
        for row, both, blocks in pairs:
            stored: list[bytes] = []
            there = timed(lambda: [stored.append(both.encode(b)) for b in blocks])  # noqa: B023
            back = timed(lambda: [both.decode(s) for s in stored])  # noqa: B023
            if number:  # the first round warms up and checks the result
                for seconds, speeds in zip((there.cpu_s, back.cpu_s), row.speeds, strict=True):
                    speeds.append(row.nbytes / max(seconds, 1e-9))
                continue
            row.stored_bytes = sum(map(len, stored))
            if [bytes(both.decode(s)) for s in stored] != blocks:
                raise RuntimeError(f"{row.way} does not restore {row.content}")
    for row, _, _ in pairs:
        row.there, row.back = map(spread, row.speeds)
    return [row for row, _, _ in pairs]


HEADERS = ("content", "way", "MB", "ratio", "there, GB/CPU-s (range)", "back", "of memcpy")


def table(rows: list[Row]) -> str:
    """The table, one line per codec and content."""
    copies = {row.content: row.there for row in rows if row.way == "memcpy"}
    lines = []
    for row in rows:
        there, back, copy = row.there, row.back, copies[row.content]
        assert there
        assert back
        assert copy
        lines.append(
            (
                row.content,
                row.way,
                f"{row.nbytes / 1e6:.1f}",
                f"{row.nbytes / row.stored_bytes:.3f}",
                f"{there.median / 1e9:.2f} ({there.low / 1e9:.2f}..{there.high / 1e9:.2f})",
                f"{back.median / 1e9:.2f}",
                f"{there.median / copy.median:.2f}",
            )
        )
    return align([HEADERS, *lines])


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__, toy="a net of 0.4 MB, 20 steps, 2 rounds")
    parser.add_argument("--hidden", type=int, help="width of the net; default 2048, toy 256")
    parser.add_argument("--steps", type=int, help="training steps; default 300, toy 20")
    parser.add_argument("--rounds", type=int, help="turns of everything; default 7, toy 2")
    options = parser.parse_args()
    options.hidden = options.hidden or (256 if options.toy else 2048)
    options.steps = options.steps or (20 if options.toy else 300)
    options.rounds = options.rounds or (2 if options.toy else 7)
    return options


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    os.environ.pop(FILE_VARIABLE, None)
    os.environ[KEY_VARIABLE] = os.urandom(32).hex()
    about = machine.description(Path.cwd())
    rows = measure(trained(options.hidden, options.steps), options.rounds)
    print(
        f"{about['cpu']}, {about['cores']} cores; one thread, blocks of {BLOCK_BYTES >> 10} KiB\n"
    )
    print(table(rows))
    if options.json:
        kept = [{k: v for k, v in asdict(row).items() if k != "speeds"} for row in rows]
        document = {**about, "block_bytes": BLOCK_BYTES, "steps": options.steps, "rows": kept}
        write_json(options.json, document)
        print(f"figures: {options.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
