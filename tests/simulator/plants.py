"""Faults that can be planted in the product, to see that the simulator finds them.

Each is a change of one line, of the kind that somebody could make in good faith.
"""

from __future__ import annotations

from typing import NamedTuple


class Plant(NamedTuple):
    """In a file of the product, a text and what stands in its place."""

    file: str
    text: str
    planted: str


PLANTS = {
    "bytes are not synchronised": Plant(
        "storage/durable.py", "os.fdatasync(self._fd)", "os.fstat(self._fd)"
    ),
    "the manifest is not synchronised": Plant(
        "storage/local.py", "os.fsync(file.fileno())", "os.fstat(file.fileno())"
    ),
    "names are not synchronised": Plant(
        "storage/durable.py",
        "        os.fsync(fd)\n    finally",
        "        os.fstat(fd)\n    finally",
    ),
    "a safe slot is overwritten": Plant(
        "coordination/versions.py",
        "protected = self._agreement.protected(id_)",
        "protected = set()",
    ),
    "a slot that the agent reads is overwritten": Plant(
        "coordination/versions.py",
        "return pool.choose(known, self._agent.pinned(), seal_bytes, image_bytes)",
        "return pool.choose(known, set(), seal_bytes, image_bytes)",
    ),
    "a rank votes before it is done": Plant(
        "coordination/agreement.py",
        "state = DONE if version is None else version.here(level)",
        "state = DONE",
    ),
    "the safe version is retired": Plant(
        "core/retention.py",
        "in newest][: max(policy.keep_last, 1)]",
        "in newest][1 : 1 + max(policy.keep_last, 1)]",
    ),
    "two runs have one generation": Plant(
        "coordination/job_history.py", "generation = 1 + max(", "generation = 0 + max("
    ),
}


def planted(name: str, source: str, path: str) -> str:
    """The source of a file with the fault of this name."""
    plant = PLANTS[name]
    if not path.endswith(f"/tierckpt/{plant.file}"):
        return source
    if plant.text not in source:
        raise ValueError(f"{plant.file} has no {plant.text!r}: the plant {name!r} is out of date")
    return source.replace(plant.text, plant.planted)
