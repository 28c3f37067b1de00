"""Checksummed JSON: small records of a line of JSON and a line with its xxh3_128. Pure.

Manifests of shards, of parity and of versions are such records, as are the persistent level's
records of its files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import xxhash

from tierckpt.errors import CorruptShardError

from .ids import FORMAT_MAJOR, FORMAT_MINOR, check_version


def head_of(kind: str) -> dict[str, str]:
    """Return the fields that every record starts with."""
    return {"format": f"tierckpt-{kind}", "format_version": f"{FORMAT_MAJOR}.{FORMAT_MINOR}"}


def check_head(values: Mapping[str, Any], kind: str, what: str) -> None:
    """Raise ValueError or KeyError for a record of another kind, FormatError for one too new."""
    if values["format"] != f"tierckpt-{kind}":
        raise ValueError(f"format is {values['format']!r}")
    check_version(values["format_version"], what)


def with_check(text: bytes) -> bytes:
    """Return the record of a line of JSON."""
    return text + b"\n" + xxhash.xxh3_128_hexdigest(text).encode() + b"\n"


def checked(data: bytes, what: str) -> bytes:
    """Read a record that `with_check` made. Raises CorruptShardError when the checksum differs."""
    text, _, check = data.partition(b"\n")
    if not check or with_check(text) != data:
        raise CorruptShardError(f"the {what} is truncated or damaged (checksum differs)")
    return text
