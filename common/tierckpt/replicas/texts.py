"""Texts for operators when replicas differ: the difference, its consequences, and what to do.
Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tierckpt._text import some
from tierckpt.core.replica_check import Finding
from tierckpt.state.entry_names import parameter_of

MOST_RANKS = 4
"""Number of ranks that are named with their nodes."""


class Consequences(NamedTuple):
    """The consequences of a finding."""

    marked: str
    """The versions that are suspect now: a sentence."""
    way_back: str
    """How to resume from a version that is not suspect: a sentence or two."""
    from_version: bool = False
    """True if this run was started from a version."""
    nodes: Sequence[str] = ()
    """The node of each rank; empty if unknown."""


SPREAD = (
    "the whole state was compared at v{version}, since replicas differ: the difference there is "
    "{difference}"
)
ALIKE_AGAIN = (
    "replicas are alike again, in the whole state, since v{version} at the latest: versions taken "
    "from here on are not suspect. Those taken while replicas differed stay marked"
)
GONE = (
    "replicas differed at v{version}, and were alike again two steps later: {difference}. {then}. "
    "The training goes on. Either the last bits of a value differed, and rounding removed the "
    "difference, or the script writes weights between the checkpointer's step() and the "
    "optimizer's next step, in a way that autograd does not count (`.data`)"
)
OFTEN_GONE = (
    ". This was seen twice, so from now on replicas are compared inside the checkpointer's step(). "
    "Weights that are written between it and the optimizer's next step (clipping, averaging) also "
    "get into parts of versions: write them before the checkpointer's step()"
)
OTHER_DEVICES = (
    "replicas are not compared: ranks have their state on devices of different kinds ({devices})"
)
SILENT = (
    "replicas were not compared at the last {boundaries} boundaries: on some rank, weights or "
    "optimizer state change between each boundary and the next optimizer step (are weights "
    "clipped, broadcast, or swapped for averages there?). Do that before the boundary, step() of "
    "the checkpointer; or set replica_check_steps=0 to turn the comparison off"
)


def never_alike(finding: Finding, then: Consequences) -> str:
    """The text for ranks that were never equal in this run."""
    back = f"To go back: {then.way_back}. " if then.from_version else ""
    own = ", ".join(dict.fromkeys(parameter_of(name) for name in finding.names[:4])) or "..."
    return (
        f"ranks train apart: {finding.what()}, seen at v{finding.version}, and they were never "
        "alike since this job was started. No further version is taken until they are alike: each "
        "rank stores a part of a version, and a restore would give a mixture, the state of no "
        f"rank. {then.marked}. {back}What to do: wrap the model in DistributedDataParallel (under "
        "Horovod: hvd.DistributedOptimizer), or all_reduce each gradient before the optimizer's "
        "step; and start all ranks with the same weights. If state differs between ranks on "
        f"purpose, name it in the setting forward_changes (here: {own!r}): each rank then stores "
        "its own"
    )


def drifted(finding: Finding, then: Consequences) -> str:
    """The text for ranks that were equal before."""
    stopped = "No further version is taken until they are alike. " if finding.apart else ""
    return (
        f"replicas differ: {finding.text()}. {stopped}{then.marked}: their parts come from ranks "
        f"that differ. To go back: {then.way_back}. To find the cause: "
        f"{_cause(finding, then.nodes)}"
    )


def parted(finding: Finding, then: Consequences, at: str, missing: Sequence[int]) -> str:
    """The text for ranks with different numbers of optimizer steps; `at` is this rank's
    position."""
    others = "some rank has"
    if missing:
        others = f"{_ranks(missing)} {'has' if len(missing) == 1 else 'have'}"
    return (
        f"ranks make different numbers of optimizer steps: {at}, and {others} not come to the "
        f"boundary of v{finding.version}. No further version is taken until restore(), and ranks "
        f"can no longer agree on signals and halt requests; the training goes on. {then.marked}. "
        f"To go back: {then.way_back}. To find the cause: {_cause(finding, then.nodes)}"
    )


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {some(numbers, MOST_RANKS)}"


def _cause(finding: Finding, nodes: Sequence[str]) -> str:
    if finding.apart:
        return (
            "some rank skips an optimizer step that others make (its loss was not finite?). Make "
            "all ranks decide together: all_reduce the value that decides"
        )
    if finding.structure:
        return (
            "parameters or optimizer state were created or removed on some ranks only: look for "
            "code that only some ranks run"
        )
    many = finding.odd is None and finding.ranks > MOST_RANKS
    ranks = range(finding.ranks) if finding.odd is None else finding.odd
    where = _where(ranks, nodes)
    if finding.odd is not None and where:
        where += ". "
    elif where:
        where = f"no majority shows which rank is wrong{'' if many else f' ({where})'}. "
    return (
        f"{where}If the same node is named again after a restart, test its memory and devices (ECC "
        "errors: nvidia-smi -q -d ECC, edac-util -v), and restart without it. If another one is "
        "named, look for code that changes weights or optimizer state on some ranks only"
    )


def _where(ranks: Sequence[int], nodes: Sequence[str]) -> str:
    with_node = [rank for rank in ranks if rank < len(nodes)]
    # A node's name starts with its host's; the rest distinguishes containers.
    hosts = [nodes[rank].partition("/")[0] for rank in with_node]
    places = [f"rank {rank} runs on {host}" for rank, host in zip(with_node, hosts, strict=True)]
    return some(places, MOST_RANKS)


__all__ = ["Consequences", "drifted", "never_alike"]
