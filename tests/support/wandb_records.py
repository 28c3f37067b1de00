"""The records of an offline run of Weights & Biases: a log of LevelDB with its own messages."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADER = b":W&B"
BLOCK_BYTES = 32768
FULL, FIRST, LAST = 1, 2, 4


def records(path: Path) -> Iterator[Any]:
    """All records of a file `run-*.wandb`."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = path.read_bytes(), 7, b""
    assert data.startswith(HEADER)
    while at + 7 <= len(data):
        left = BLOCK_BYTES - at % BLOCK_BYTES
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        part = data[at + 7 : at + 7 + length]
        at += 7 + length
        whole = part if kind in (FULL, FIRST) else whole + part
        if kind in (FULL, LAST):
            yield wandb_internal_pb2.Record.FromString(whole)


def rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a run's history."""
    return [
        {
            "/".join(item.nested_key) or item.key: json.loads(item.value_json)
            for item in each.history.item
        }
        for each in records(path)
        if each.WhichOneof("record_type") == "history"
    ]


def project(path: Path) -> str:
    """The project of a run."""
    return next(
        str(each.run.project) for each in records(path) if each.WhichOneof("record_type") == "run"
    )
