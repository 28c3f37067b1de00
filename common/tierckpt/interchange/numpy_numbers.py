"""Numbers of numpy in files of `torch.save`: scripts compute learning rates and metrics with it.

numpy's own functions would take flags and pointers from a file, so they are not called: a number is
made from its bytes. Arrays are not read.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .foreign_state import Unread

MOST_BYTES = 1 << 10
"""Limit of one number or text."""


class Dtype:
    """Stands for `numpy.dtype` in a pickle."""

    def __init__(self, code: Any, *_: Any) -> None:
        self._code, self._order = code, "|"

    def __setstate__(self, state: Any) -> None:
        """Take the byte order, and nothing else."""
        self._order = state[1]

    def made(self) -> np.dtype[Any] | None:
        """The type of a number or a text; None for any other."""
        if not isinstance(self._code, str) or self._order not in ("|", "<", ">", "="):
            return None
        found = np.dtype(self._code).newbyteorder(self._order)  # type: ignore[arg-type]
        return found if found.kind in "biufcSU" else None


class UnreadScalar(Unread):
    """Stands for a scalar that is no number."""

    name = "numpy.generic"


def scalar(dtype: Any, data: Any = None) -> Any:
    """Stands for numpy's function of that name: makes a number from its bytes."""
    try:
        kind = dtype.made()
        if kind is None or not isinstance(data, bytes) or len(data) > MOST_BYTES:
            return UnreadScalar()
        return np.frombuffer(data, kind)[0]
    except (AttributeError, TypeError, ValueError, IndexError):
        return UnreadScalar()


BY_NAME: dict[str, Any] = {
    "numpy.dtype": Dtype,
    "numpy.core.multiarray.scalar": scalar,
    "numpy._core.multiarray.scalar": scalar,
}
"""By the names in files; the last is that of numpy 2."""

__all__ = ["BY_NAME"]
