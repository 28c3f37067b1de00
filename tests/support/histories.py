"""Versions of several runs of one job, for hypothesis."""

from __future__ import annotations

from hypothesis import assume
from hypothesis import strategies as st

from tierckpt.format import Lineage, VersionId, newest_first


@st.composite
def histories(draw: st.DrawFn) -> dict[VersionId, Lineage]:
    """Versions that several runs of a job wrote, each with the lineage of its run."""
    written: dict[VersionId, Lineage] = {}
    generation = 0
    for _ in range(draw(st.integers(1, 5))):
        generation += draw(st.integers(1, 3))
        lineage: Lineage = ((generation, 0),)
        if written and draw(st.integers(0, 4)):
            parent = draw(st.sampled_from(newest_first(written.items())))
            lineage = (*written[parent], (generation, parent.version))
        base = lineage[-1][1]
        for version in range(base + 1, base + 1 + draw(st.integers(0, 5))):
            written[VersionId(generation, version)] = lineage
    assume(written)
    return written
