"""The result of a restore, as a script uses it."""

from __future__ import annotations

import copy
import pickle

from tierckpt.restored import Restored


def test_it_is_printed_and_stored_as_a_number() -> None:
    """Also by nanoGPT, which writes the iteration into its own checkpoint."""
    restored = Restored(12)
    assert f"iter {restored}: {restored:4d}" == "iter 12:   12"
    assert str(restored) == "12"
    assert repr(restored).startswith("Restored(12 calls, version=0")
    for other in (pickle.loads(pickle.dumps(restored)), copy.deepcopy(restored)):
        assert type(other) is int
        assert other == 12
