"""The state that a job must have, by version: computed without the product."""

from __future__ import annotations

import types
from pathlib import Path


def fingerprints(steps: int) -> list[str]:
    """The fingerprints of versions 0 to `steps`."""
    space = types.ModuleType("reference")
    source = (Path(__file__).parent / "programs.py").read_text()
    source = "\n".join(line for line in source.split("\n") if not line.startswith("from tierckpt"))
    exec(compile(source, "programs.py", "exec"), space.__dict__)
    model, optimizer = space.new_state()
    found = [space.fingerprint(model, optimizer)]
    for version in range(steps):
        space.train_one(model, optimizer, version)
        found.append(space.fingerprint(model, optimizer))
    return found
