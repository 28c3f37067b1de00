"""The kernels: ISA-L and numpy give the bytes of the definition, for any buffers."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierckpt.erasure import Matrix, Product, decoding, kernels, multiply
from tierckpt.erasure.kernels import TILE_BYTES, Isal

found = kernels.find_isal()
needs_isal = pytest.mark.skipif(found is None, reason="ISA-L is not installed")
backends = pytest.mark.parametrize(
    "library", [pytest.param(found, id="isal", marks=needs_isal), pytest.param(None, id="numpy")]
)


def noise(nbytes: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def by_definition(matrix: Matrix, sources: list[bytes], lengths: list[int]) -> list[bytes]:
    outputs = []
    for row, nbytes in zip(matrix, lengths, strict=True):
        out = bytearray(nbytes)
        for factor, source in zip(row, sources, strict=True):
            for at, value in enumerate(source[:nbytes]):
                out[at] ^= multiply(factor, value)
        outputs.append(bytes(out))
    return outputs


@st.composite
def problems(draw: st.DrawFn) -> tuple[Matrix, list[bytes], list[int]]:
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    elements = st.one_of(st.sampled_from([0, 1, 2]), st.integers(0, 255))
    row = st.tuples(*[elements] * columns)
    matrix = draw(st.tuples(*[row] * rows))
    # Around the lengths at which vector code changes over to its tail.
    lengths = st.one_of(st.integers(0, 70), st.integers(120, 260))
    sources = [noise(draw(lengths), seed).tobytes() for seed in range(columns)]
    return matrix, sources, [draw(lengths) for _ in range(rows)]


@backends
@given(problem=problems(), shift=st.integers(0, 3))
def test_any_lengths_and_alignments(
    library: Isal | None, problem: tuple[Matrix, list[bytes], list[int]], shift: int
) -> None:
    matrix, sources, lengths = problem
    views = [memoryview(bytes(shift) + s)[shift:] for s in sources]
    rooms = [bytearray(b"\xaa" * (shift + n + 8)) for n in lengths]  # never zero before
    outs = [memoryview(r)[shift : shift + n] for r, n in zip(rooms, lengths, strict=True)]
    Product(matrix, library).run(views, outs)
    assert [bytes(out) for out in outs] == by_definition(matrix, sources, lengths)
    for room, nbytes in zip(rooms, lengths, strict=True):
        assert room[:shift] + room[shift + nbytes :] == b"\xaa" * (shift + 8), "wrote outside"


@needs_isal
@pytest.mark.parametrize(("k", "m"), [(1, 1), (1, 4), (2, 1), (4, 2), (6, 2), (28, 4), (252, 4)])
@pytest.mark.parametrize("nbytes", [1, 2 * TILE_BYTES + 4097])
def test_isal_and_numpy_give_the_same_parity(k: int, m: int, nbytes: int) -> None:
    matrix = decoding(k, range(k), range(k, k + m))
    sources = [memoryview(noise(nbytes, seed)) for seed in range(k)]
    made = []
    for library in (found, None):
        outs = [bytearray(nbytes) for _ in range(m)]
        Product(matrix, library).run(sources, outs)
        made.append(outs)
    assert made[0] == made[1]
    assert made[0][0] == np.bitwise_xor.reduce(np.stack(sources)).tobytes(), "parity 0 is XOR"


@backends
def test_a_product_is_used_again_with_other_lengths(library: Isal | None) -> None:
    matrix: Matrix = ((1, 231), (1, 1))
    product = Product(matrix, library)
    for lengths in ((300, 300), (300, 10), (10, 300), (0, 0), (300, 300)):
        sources = [noise(n, 7).tobytes() for n in lengths]
        outs = [bytearray(200), bytearray(300)]
        product.run(sources, outs)
        assert [bytes(o) for o in outs] == by_definition(matrix, sources, [200, 300])


@backends
def test_no_buffer_is_held_after_the_call(library: Isal | None) -> None:
    source, out = bytearray(b"abc"), bytearray(3)
    Product(((1,),), library).run([memoryview(source)], [memoryview(out)])
    source.extend(b"d")  # a BufferError, were it still exported
    out.extend(b"d")
    assert out == b"abcd"


LONG_BYTES = 4 << 20


@backends
def test_computed_output_is_not_copied(library: Isal | None) -> None:
    """At any length: sources and outputs are used in place."""
    product = Product(decoding(4, range(4), range(4, 6)), library)
    sources = [memoryview(noise(LONG_BYTES, seed)) for seed in range(4)]
    outs = [bytearray(LONG_BYTES) for _ in range(2)]
    product.run(sources, outs)  # tables are made once
    tracemalloc.start()  # numpy's arrays are seen, too
    try:
        product.run(sources, outs)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < LONG_BYTES / 4, "numpy has tiles of its own"


@backends
def test_other_threads_run_while_it_computes(library: Isal | None) -> None:
    """No thread asks for the GIL: another thread makes progress where it is released."""
    product, source, out = Product(((231,),), library), bytes(LONG_BYTES), bytearray(LONG_BYTES)
    ticks, over = [0], threading.Event()

    def tick() -> None:
        while not over.is_set():
            ticks[0] += 1
            time.sleep(0)

    interval_seconds = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        other = threading.Thread(target=tick)
        other.start()
        before = ticks[0]
        for _ in range(1000):  # once should do, but for a busy machine
            product.run([source], [out])
            if ticks[0] > before:
                break
        got_on = ticks[0] > before
    finally:
        over.set()
        sys.setswitchinterval(interval_seconds)
        other.join()
    assert got_on


@backends
def test_unusable_arguments_are_refused(library: Isal | None) -> None:
    with pytest.raises(ValueError, match="read-only"):
        Product(((1,),), library).run([b"a"], [memoryview(b"b")])
    with pytest.raises(ValueError, match="1 x 2 was given 1 outputs and 1 sources"):
        Product(((1, 1),), library).run([b"a"], [bytearray(1)])
    for matrix in ((), ((),), ((1, 2), (1,))):
        with pytest.raises(ValueError, match="not a matrix"):
            Product(matrix, library)


# --- the library ---------------------------------------------------------------------------------


@pytest.fixture
def candidates(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    offered: list[str] = []
    monkeypatch.setattr(kernels, "_isal_candidates", lambda: iter(offered))
    kernels.find_isal.cache_clear()
    yield offered
    kernels.find_isal.cache_clear()


def test_without_a_library_there_is_none_and_a_sentence_says_how_to_get_it(
    candidates: list[str],
) -> None:
    candidates += ["/nonexistent/libisal.so.2", "libc.so.6"]  # missing; and another library
    assert kernels.find_isal() is None
    for way in ("libisal2", "pip install 'tierckpt[rs]'", "numpy"):
        assert way in kernels.ISAL_MISSING


@needs_isal
def test_the_first_library_that_works_is_taken(candidates: list[str]) -> None:
    assert found is not None
    candidates += ["libc.so.6", found.path, "/nonexistent/libisal.so.2"]
    library = kernels.find_isal()
    assert library is not None
    assert library.path == found.path
    assert kernels.find_isal() is library


@needs_isal
def test_a_library_of_another_field_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found is not None
    monkeypatch.setattr(kernels, "multiply", lambda a, b: a ^ b)
    with pytest.raises(ValueError, match="another field"):
        Isal(found.path)


@pytest.mark.skipif(importlib.util.find_spec("pyeclib") is None, reason="pyeclib is not installed")
def test_the_library_in_pyeclibs_wheel_is_found() -> None:
    paths = list(kernels._isal_candidates())
    assert paths[0] == kernels.SONAME
    assert any("pyeclib.libs" in path for path in paths[1:])
    Isal(paths[-1])


@needs_isal
def test_calls_longer_than_an_int_can_say_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_CALL_BYTES", 100)
    sources = [noise(1001, seed) for seed in range(3)]
    outs = [bytearray(1001)]
    Product(((1, 231, 253),), found).run([memoryview(s) for s in sources], outs)
    again = [bytearray(1001)]
    Product(((1, 231, 253),), None).run([memoryview(s) for s in sources], again)
    assert outs == again
