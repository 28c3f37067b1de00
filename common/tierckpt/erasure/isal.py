"""A thin binding to ISA-L, Intel's library for erasure codes, if it is installed.

Called through ctypes, which releases the GIL, on the addresses of the buffers themselves: no
copies. The library is the system's, or the one in pyeclib's wheel. Without it `kernels` computes
the same bytes with numpy, several times slower.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from .gf256 import Matrix, multiply

SONAME = "libisal.so.2"

MISSING = (
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
def find() -> Isal | None:
    """The first usable library; None when there is none. Looks once per process."""
    for path in _candidates():
        try:
            return Isal(path)
        except (OSError, AttributeError, ValueError):
            continue
    return None


def _candidates() -> Iterator[str]:
    yield SONAME  # the loader knows the path of the system's library
    wheel = importlib.util.find_spec("pyeclib")  # finds the wheel without importing it
    for folder in (wheel.submodule_search_locations or ()) if wheel else ():
        beside = Path(folder).parent / "pyeclib.libs"
        yield from (str(path) for path in sorted(beside.glob("libisal*.so.2")))
