"""The field GF(2^8), and the coefficients of the one code of all schemes.

Pure, and for single numbers: `kernels` does the same for megabytes. Addition is XOR; multiplication
is that of polynomials modulo x^8 + x^4 + x^3 + x^2 + 1 (0x11d), as in ISA-L.

The code is a Cauchy Reed-Solomon code (Blömer et al., 1995): parity `p` of data `d_0 ... d_(k-1)`
is the sum of `coefficient(p, s) * d_s`, and any k of the k + m symbols determine the rest. Its rows
and columns are scaled so that the first of each is all ones. This keeps the property, and makes one
parity plain XOR, one datum plain copying, and the repair of one shard as cheap as XOR under any
scheme. A coefficient depends on its row and column only, not on k or m.
"""

from __future__ import annotations

from collections.abc import Sequence

POLYNOMIAL = 0x11D

MOST_SYMBOLS = 256
"""Limit of k + m: the code needs one distinct element of the field for each symbol."""

Matrix = tuple[tuple[int, ...], ...]
"""A row for every output, a column for every source."""


def _powers_of_two() -> list[int]:
    """2^0, 2^1, ... for two cycles: 2 generates the field, and a sum of logarithms needs no mod."""
    powers, value = [], 1
    for _ in range(2 * 255):
        powers.append(value)
        value <<= 1
        if value > 255:
            value ^= POLYNOMIAL
    return powers


_EXP = _powers_of_two()
_LOG = {value: exponent for exponent, value in enumerate(_EXP[:255])}


def multiply(a: int, b: int) -> int:
    """Product of two elements, 0 to 255."""
    return _EXP[_LOG[a] + _LOG[b]] if a and b else 0


def inverse(a: int) -> int:
    """The element with product 1 with `a`. Raises ZeroDivisionError for 0."""
    if not a:
        raise ZeroDivisionError("0 has no inverse")
    return _EXP[255 - _LOG[a]]


def coefficient(parity: int, datum: int) -> int:
    """Factor of datum number `datum` in parity number `parity`; never 0.

    1 / (x + y) with x = 255 - parity and y = datum is a Cauchy matrix as long as no x equals a y,
    so for up to MOST_SYMBOLS symbols. The factor (x + y_0) (x_0 + y) / (x_0 + y_0) scales rows and
    columns so that the first ones are all ones.
    """
    scale = multiply(multiply(255 ^ parity, 255 ^ datum), inverse(255))
    return multiply(scale, inverse(255 ^ parity ^ datum))


def invert(matrix: Sequence[Sequence[int]]) -> Matrix:
    """Inverse of a square matrix, by Gauss-Jordan. Raises ZeroDivisionError if there is none."""
    size = len(matrix)
    rows = [[*row, *(int(i == j) for j in range(size))] for i, row in enumerate(matrix)]
    for column in range(size):
        pivot = next((r for r in range(column, size) if rows[r][column]), column)
        rows[column], rows[pivot] = rows[pivot], rows[column]
        factor = inverse(rows[column][column])
        rows[column] = [multiply(factor, value) for value in rows[column]]
        for other in range(size):
            if other != column and rows[other][column]:
                rows[other] = _add_scaled(rows[other], rows[other][column], rows[column])
    return tuple(tuple(row[size:]) for row in rows)


def decoding(k: int, known: Sequence[int], wanted: Sequence[int]) -> Matrix:
    """The matrix that computes the `wanted` symbols of a code word from `k` `known` ones.

    Symbols 0 to k - 1 are the data, the parities follow. Columns are in the order of `known`. With
    all data known and parities wanted, this is the encoding matrix. It solves only one equation for
    each missing datum (at most m), so its cost stays small for large k.
    """
    if len(set(known)) != k or len(known) != k:
        raise ValueError(f"a code word of {k} data takes {k} known symbols, not {list(known)}")
    missing = [s for s in range(k) if s not in known]
    checks = [symbol - k for symbol in known if symbol >= k]
    solved = invert([[coefficient(p, s) for s in missing] for p in checks])
    data: dict[int, list[int]] = {s: [int(s == c) for c in known] for s in range(k) if s in known}
    for s, weights in zip(missing, solved, strict=True):
        # The parities, minus the contributions of the known data, through the inverse.
        row = [0] * k
        for p, weight in zip(checks, weights, strict=True):
            part = [coefficient(p, c) if c < k else int(c == k + p) for c in known]
            row = _add_scaled(row, weight, part)
        data[s] = row
    return tuple(tuple(data[w] if w < k else _parity(w - k, data)) for w in wanted)


def _parity(parity: int, data: dict[int, list[int]]) -> list[int]:
    row = [0] * len(data)
    for s, datum in data.items():
        row = _add_scaled(row, coefficient(parity, s), datum)
    return row


def _add_scaled(row: Sequence[int], factor: int, other: Sequence[int]) -> list[int]:
    return [a ^ multiply(factor, b) for a, b in zip(row, other, strict=True)]
