"""Times and sizes as people write them, and lists in messages."""

from __future__ import annotations

import math

import pytest

from tierckpt._text import bytes_of, seconds_of, some, time_text
from tierckpt.errors import ConfigError


def test_times_and_sizes() -> None:
    assert [
        seconds_of(t) for t in ("20ms", "1.5s", "3m", "8h", "2d", "1y", 7, "inf", math.inf)
    ] == [
        *(0.02, 1.5, 180, 28800, 172800, 365 * 86400, 7),
        *(math.inf, math.inf),
    ]
    assert [bytes_of(t) for t in ("201MB", "1.5 GB", "64GiB", "5kB", "64k", "1.5G", 8)] == [
        *(201e6, 1.5e9, 64 * 2**30, 5000, 65536, 3 * 2**29, 8),
    ]
    assert [time_text(t) for t in (0.0005, 90, 86400, 400 * 86400, math.inf)] == [
        *("0.5 ms", "1.5 m", "1 d", "400 d", "never"),
    ]
    for nonsense in ("soon", "5 parsecs", True, None, float("nan")):
        with pytest.raises(ConfigError, match="write for example"):
            seconds_of(nonsense)
        with pytest.raises(ConfigError, match="write for example"):
            bytes_of(nonsense)


def test_of_a_long_list_the_first_few_are_shown_and_the_number_of_the_others() -> None:
    assert some([]) == ""
    assert some(["a", "b", "c"]) == "a, b, c"
    assert some(["a", "b", "c", "d"]) == "a, b, c and 1 more"
    assert some(range(12), 8) == "0, 1, 2, 3, 4, 5, 6, 7 and 4 more"
    assert some(["a, b", "c", "d", "e"], 2, "; ") == "a, b; c and 2 more"
