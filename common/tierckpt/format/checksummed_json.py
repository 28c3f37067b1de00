"""Checksummed JSON: small records of a line of JSON and a line with its xxh3_128. Pure.

Manifests of shards, of parity and of versions are such records, as are the persistent level's
records of its files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import xxhash

from tierckpt._text import in_words
from tierckpt.errors import CorruptShardError, FormatError

from .ids import FORMAT_MAJOR, FORMAT_MINOR, check_version


def head_of(kind: str) -> dict[str, str]:
    """Return the fields that every record starts with."""
    return {"format": f"tierckpt-{kind}", "format_version": f"{FORMAT_MAJOR}.{FORMAT_MINOR}"}


def check_head(values: Mapping[str, Any], kind: str, what: str) -> None:
    """Raise ValueError or KeyError for a record of another kind, FormatError for one too new."""
    if values["format"] != f"tierckpt-{kind}":
        raise ValueError(f"format is {values['format']!r}")
    check_version(values["format_version"], what)


def misfit(values: object, what: str, error: Exception) -> FormatError:
    """The error for intact bytes that cannot be read as `what`, because of `error`: `values`, if
    they are a record at all, lack a field or have another one, perhaps since their format has
    another version."""
    written = values.get("format_version") if isinstance(values, Mapping) else None
    ours = f"{FORMAT_MAJOR}.{FORMAT_MINOR}"
    why = f"it has no {error}" if isinstance(error, KeyError) else in_words(error)
    if written in (None, ours):
        return FormatError(f"not a {what}: {why}")
    return FormatError(
        f"this {what} has format version {written}, and {why}, so this tierckpt, which reads "
        f"{ours}, cannot use it. Export it with the tierckpt that wrote it (`tierckpt export "
        "PATH out.pt`), and import that here (`tierckpt import out.pt NEW_PATH`)"
    )


def with_check(text: bytes) -> bytes:
    """Return the record of a line of JSON."""
    return text + b"\n" + xxhash.xxh3_128_hexdigest(text).encode() + b"\n"


def checked(data: bytes, what: str) -> bytes:
    """Read a record that `with_check` made. Raises CorruptShardError when the checksum differs."""
    text, _, check = data.partition(b"\n")
    if not check or with_check(text) != data:
        raise CorruptShardError(f"the {what} is truncated or damaged (checksum differs)")
    return text
