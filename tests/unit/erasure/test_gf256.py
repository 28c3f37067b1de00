"""The field and the code's coefficients: pinned by hand-made values, checked by brute force."""

from __future__ import annotations

import itertools

import pytest

from tierckpt.erasure import coefficient, decoding, inverse, invert, multiply


def slow_multiply(a: int, b: int) -> int:
    """Multiplication as on paper: shift and add, then subtract the polynomial from the top down."""
    product = 0
    for bit in range(8):
        if b >> bit & 1:
            product ^= a << bit
    for bit in range(14, 7, -1):
        if product >> bit & 1:
            product ^= 0x11D << bit - 8
    return product


def test_every_product_is_right() -> None:
    for a, b in itertools.product(range(256), repeat=2):
        assert multiply(a, b) == slow_multiply(a, b)


def test_every_inverse_is_one_and_zero_has_none() -> None:
    assert all(slow_multiply(a, inverse(a)) == 1 for a in range(1, 256))
    with pytest.raises(ZeroDivisionError):
        inverse(0)


def test_the_coefficients_are_the_stored_format() -> None:
    """After a change of these, existing parity cannot be read."""
    assert [coefficient(0, s) for s in range(6)] == [1] * 6
    assert [coefficient(p, 0) for p in range(6)] == [1] * 6
    assert [coefficient(1, s) for s in range(6)] == [1, 231, 253, 2, 183, 171]
    assert [coefficient(2, s) for s in range(6)] == [1, 253, 190, 44, 150, 39]
    for p, s in itertools.product(range(4), range(32)):  # the definition, without its divisions
        left = slow_multiply(255 ^ p, 255 ^ s)
        assert left == slow_multiply(slow_multiply(255, 255 ^ p ^ s), coefficient(p, s))


def test_the_largest_codes_have_all_their_coefficients() -> None:
    for k, m in ((252, 4), (128, 128), (1, 255), (255, 1)):
        assert all(coefficient(p, s) for p in range(m) for s in range(k))
    with pytest.raises(ZeroDivisionError):
        coefficient(1, 254)  # k = 255 and m = 2: one symbol too many


@pytest.mark.parametrize(("k", "m"), [(1, 3), (2, 2), (3, 3), (4, 2), (5, 1), (4, 4)])
def test_any_k_symbols_determine_all_others(k: int, m: int) -> None:
    """Exhaustive over the choices: the code words of unit vectors are restored."""
    encode = decoding(k, range(k), range(k + m))
    for known in itertools.combinations(range(k + m), k):
        for order in (known, known[::-1]):
            matrix = decoding(k, order, range(k + m))
            for d in range(k):
                word = [row[d] for row in encode]
                for symbol, row in enumerate(matrix):
                    value = 0
                    for factor, source in zip(row, order, strict=True):
                        value ^= slow_multiply(factor, word[source])
                    assert value == word[symbol]


def test_one_lost_datum_comes_back_by_xor_alone() -> None:
    for lost in range(6):
        known = [s for s in range(7) if s != lost]  # the other data, and parity 0
        assert decoding(6, known, [lost]) == ((1,) * 6,)


def test_too_few_symbols_are_refused() -> None:
    for known in ([0, 1], [0, 1, 1], [0, 1, 2, 3]):
        with pytest.raises(ValueError, match="3 known symbols"):
            decoding(3, known, [0])


def test_inverting_needs_rows_that_are_independent() -> None:
    assert invert([[0, 1], [1, 0]]) == ((0, 1), (1, 0)), "the pivot has to be looked for"
    with pytest.raises(ZeroDivisionError):
        invert([[1, 2], [2, 4]])
