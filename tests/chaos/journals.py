"""Journals of a round's ranks, read while they grow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Line = dict[str, Any]


class Journals:
    """All lines of all ranks; `read` adds new ones."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self._paths = [folder / f"journal-r{rank}.jsonl" for rank in range(ranks)]
        self._offsets = [0] * ranks
        self.lines: list[list[Line]] = [[] for _ in range(ranks)]

    def read(self) -> list[tuple[int, Line]]:
        """New lines, each with its rank; a half-written line comes next time."""
        found: list[tuple[int, Line]] = []
        for rank, path in enumerate(self._paths):
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._offsets[rank])
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._offsets[rank] += len(whole)
            new = [json.loads(line) for line in whole.splitlines()]
            self.lines[rank] += new
            found += [(rank, line) for line in new]
        return found

    def of(self, rank: int, life: int, key: str) -> list[Line]:
        """A rank's lines of one run that have `key`."""
        return [x for x in self.lines[rank] if x["life"] == life and key in x]
