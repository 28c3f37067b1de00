"""The arithmetic over windows of memory: outputs = matrix x sources, in place, by ISA-L or numpy.

Both give the same bytes. ISA-L runs at the speed of memory, also where all coefficients are one
and the product is a plain XOR. numpy comes near to it for XOR; it computes other products from
tables, several times slower.

ISA-L is Intel's library for erasure codes, the system's or the one in pyeclib's wheel. It is
called through ctypes, which releases the GIL, on the addresses of the buffers themselves: no
copies.

numpy is imported here, so only jobs with a peer level pay for it.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .codes import Matrix, multiply

SONAME = "libisal.so.2"

ISAL_MISSING = (
    "ISA-L was not found: Reed-Solomon parity is computed by numpy, at about an eighth of the "
    "speed. Install the system's package (libisal2 on Debian and Ubuntu, isa-l on Fedora), or "
    "pip install 'tierckpt[rs]'; parity stays the same, to the bit"
)
"""For a notice at the start of a job that asks for rs; see `find`."""

TABLE_BYTES = 32
"""Size of ISA-L's table for each coefficient."""

_CALL_BYTES = 1 << 30
"""Limit of one call: ISA-L counts in C ints."""


class Isal:
    """The loaded library. Threads may share it: it keeps no state.

    Raises OSError when `path` cannot be loaded, AttributeError when it lacks a function, ValueError
    when it computes in another field than ours.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        library = ctypes.CDLL(path)
        number, pointer = ctypes.c_int, ctypes.c_void_p
        self._init_tables = library.ec_init_tables
        self._init_tables.argtypes = [number, number, ctypes.c_char_p, pointer]
        self._init_tables.restype = None
        self._encode_data = library.ec_encode_data
        self._encode_data.argtypes = [number, number, number, pointer, pointer, pointer]
        self._encode_data.restype = None
        library.gf_mul.argtypes = [ctypes.c_ubyte, ctypes.c_ubyte]
        library.gf_mul.restype = ctypes.c_ubyte
        if any(library.gf_mul(a, 2) != multiply(a, 2) for a in range(256)):
            raise ValueError(f"{path} computes in another field than 0x11d")

    def tables(self, matrix: Matrix) -> ctypes.Array[ctypes.c_char]:
        """Tables of `matrix` for `encode`; the matrix has at least one row and column."""
        flat = bytes(value for row in matrix for value in row)
        tables = ctypes.create_string_buffer(TABLE_BYTES * len(flat))
        self._init_tables(len(matrix[0]), len(matrix), flat, tables)
        return tables

    def encode(
        self,
        tables: ctypes.Array[ctypes.c_char],
        sources: Sequence[int],
        outputs: Sequence[int],
        nbytes: int,
    ) -> None:
        """Write `nbytes` at each address of `outputs`, from `nbytes` at each address of `sources`.

        The memory must not move, and outputs must not overlap any other buffer. Any alignment.
        """
        for done in range(0, nbytes, _CALL_BYTES):
            ins = (ctypes.c_void_p * len(sources))(*(a + done for a in sources))
            outs = (ctypes.c_void_p * len(outputs))(*(a + done for a in outputs))
            step = min(_CALL_BYTES, nbytes - done)
            self._encode_data(step, len(sources), len(outputs), tables, ins, outs)


@cache
def find_isal() -> Isal | None:
    """The first usable library; None when there is none. Looks once per process."""
    for path in _isal_candidates():
        try:
            return Isal(path)
        except (OSError, AttributeError, ValueError):
            continue
    return None


def _isal_candidates() -> Iterator[str]:
    yield SONAME  # the loader knows the path of the system's library
    wheel = importlib.util.find_spec("pyeclib")  # finds the wheel without importing it
    for folder in (wheel.submodule_search_locations or ()) if wheel else ():
        beside = Path(folder).parent / "pyeclib.libs"
        yield from (str(path) for path in sorted(beside.glob("libisal*.so.2")))


Bytes: TypeAlias = NDArray[np.uint8]
Buffer: TypeAlias = memoryview | bytes | bytearray

TILE_BYTES = 128 * 1024
"""numpy reads a tile once for each source, so a tile should fit into the core's own cache."""

_Compute: TypeAlias = Callable[[list[Bytes], list[Bytes]], None]


class Product:
    """Multiplies windows by one matrix. Threads may share it, and run it at the same time.

    `library` is the result of `isal.find()`; None computes with numpy. Raises ValueError when
    `matrix` is empty or ragged.
    """

    def __init__(self, matrix: Matrix, library: Isal | None) -> None:
        """Check the matrix."""
        if not matrix or not matrix[0] or len({len(row) for row in matrix}) != 1:
            raise ValueError(f"not a matrix: {matrix}")
        self.matrix = matrix
        self._library = library
        self._parts: dict[tuple[tuple[int, ...], tuple[int, ...]], _Compute] = {}

    def run(self, sources: Sequence[Buffer], outputs: Sequence[Buffer]) -> None:
        """Overwrite `outputs` with the product of the matrix and `sources`.

        Buffers may differ in length and have any alignment. A source shorter than others counts as
        padded with zeros; a row of the product is computed up to the length of its output. Outputs
        must be writable and overlap no other buffer. After return no reference to a buffer is kept.
        No Python object grows with the length, and the GIL is free while bytes are computed.

        Raises ValueError when the matrix has another shape, or an output is read-only.
        """
        if (len(outputs), len(sources)) != (len(self.matrix), len(self.matrix[0])):
            raise ValueError(
                f"a matrix of {len(self.matrix)} x {len(self.matrix[0])} was given "
                f"{len(outputs)} outputs and {len(sources)} sources"
            )
        ins, outs = [_array(s) for s in sources], [_array(o) for o in outputs]
        if not all(out.flags.writeable for out in outs):
            raise ValueError("an output is read-only")
        # Where buffers have different lengths, each stretch gets its own, smaller matrix.
        low = 0
        for high in sorted({a.size for a in (*ins, *outs)} - {0}):
            rows = tuple(i for i, out in enumerate(outs) if out.size >= high)
            columns = tuple(i for i, source in enumerate(ins) if source.size >= high)
            targets = [outs[i][low:high] for i in rows]
            if targets and columns:
                self._part(rows, columns)([ins[i][low:high] for i in columns], targets)
            else:
                for target in targets:
                    target.fill(0)
            low = high

    def _part(self, rows: tuple[int, ...], columns: tuple[int, ...]) -> _Compute:
        """The function that computes these rows from these columns alone."""
        if (rows, columns) not in self._parts:
            matrix = tuple(tuple(self.matrix[r][c] for c in columns) for r in rows)
            library = self._library
            made = _by_numpy(matrix) if library is None else _by_isal(matrix, library)
            self._parts[rows, columns] = made
        return self._parts[rows, columns]


def _array(buffer: Buffer) -> Bytes:
    """The buffer's own bytes, as an array."""
    view = memoryview(buffer).cast("B") if len(buffer) else memoryview(bytearray())
    return np.asarray(view)


def _by_isal(matrix: Matrix, library: Isal) -> _Compute:
    tables = library.tables(matrix)

    def compute(ins: list[Bytes], outs: list[Bytes]) -> None:
        sources, targets = ([a.ctypes.data for a in arrays] for arrays in (ins, outs))
        library.encode(tables, sources, targets, outs[0].size)

    return compute


def _by_numpy(matrix: Matrix) -> _Compute:
    def compute(ins: list[Bytes], outs: list[Bytes]) -> None:
        scratch = np.empty(TILE_BYTES // 2, np.uint16)
        for low in range(0, outs[0].size, TILE_BYTES):
            tiles = [source[low : low + TILE_BYTES] for source in ins]
            for row, out in zip(matrix, outs, strict=True):
                _sum(row, tiles, out[low : low + TILE_BYTES], scratch)

    return compute


def _sum(
    row: Sequence[int], tiles: Sequence[Bytes], out: Bytes, scratch: NDArray[np.uint16]
) -> None:
    """`out` = sum of row[i] * tiles[i]."""
    if len(row) > 1 and row[0] == row[1] == 1:
        np.bitwise_xor(tiles[0], tiles[1], out=out)
        row, tiles = row[2:], tiles[2:]
    else:
        out.fill(0)
    for factor, tile in zip(row, tiles, strict=True):
        term = tile if factor == 1 else _scaled(factor, tile, scratch)
        np.bitwise_xor(out, term, out=out)


def _scaled(factor: int, tile: Bytes, scratch: NDArray[np.uint16]) -> Bytes:
    """factor * tile, in `scratch`."""
    pairs, odd = divmod(tile.size, 2)
    table = _table(factor)
    # Every index is in the table; `clip` only stops numpy from making a copy for its check.
    np.take(table, tile[: 2 * pairs].view(np.uint16), out=scratch[:pairs], mode="clip")
    scaled = scratch.view(np.uint8)[: tile.size]
    if odd:
        scaled[-1] = multiply(factor, int(tile[-1]))
    return scaled


@cache
def _table(factor: int) -> NDArray[np.uint16]:
    """The products of all pairs of bytes: 128 KiB for a coefficient; at most 255 coefficients."""
    single = np.array([multiply(factor, value) for value in range(256)], np.uint16)
    return (single[:, None] << 8 | single[None, :]).astype(np.uint16).reshape(-1)
