"""What operators read of replicas that differ: what differs, what became of versions, what to do.
Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tierckpt._text import some
from tierckpt.core.replica_check import Finding
from tierckpt.state.names import parameter_of

MOST_RANKS = 4
"""Named with their nodes."""


class Consequences(NamedTuple):
    """Of a finding."""

    marked: str
    """Which versions are suspect now, in words: a sentence."""
    way_back: str
    """How to go on from a version that is none: a sentence or two."""
    from_version: bool = False
    """This run was started from a version."""
    nodes: Sequence[str] = ()
    """On which each rank runs; empty where that is not known."""


SPREAD = (
    "since replicas differ, all of the state was compared at v{version}: there, what differs is "
    "{what}"
)
ALIKE_AGAIN = (
    "replicas are alike again, in all of the state, since v{version} at the latest: versions taken "
    "from here on are not suspect. Those taken while replicas differed stay marked"
)
GONE = (
    "replicas differed at v{version}, and were alike again two steps later: {what}. {then}. The "
    "training goes on. Either the last bits of a value differed, and rounding removed that, or "
    "weights are written between the checkpointer's step() and the optimizer's next step, in a way "
    "that autograd does not count (`.data`), while they are read"
)
OFTEN_GONE = (
    ". This was seen twice, so from now on replicas are compared inside of the checkpointer's "
    "step(). What is written to weights between it and the optimizer's next step (clipping, "
    "averaging) also gets into parts of versions: do that before the checkpointer's step()"
)
OTHER_DEVICES = (
    "ranks have their state on devices of different kinds ({what}): replicas are not compared"
)
SILENT = (
    "replicas were not compared at the last {boundaries} boundaries: on some rank weights or "
    "optimizer state change between each boundary and the next optimizer step (are weights clipped "
    "there, broadcast, or swapped for averages?). Do that before the boundary, step() of the "
    "checkpointer; or set replica_check_steps=0, and replicas are not compared"
)


def never_alike(finding: Finding, then: Consequences) -> str:
    """Of ranks that nobody ever made alike in this run."""
    back = f"To go back: {then.way_back}. " if then.from_version else ""
    own = ", ".join(dict.fromkeys(parameter_of(name) for name in finding.names[:4])) or "..."
    return (
        f"ranks train apart: {finding.what()}, seen at v{finding.version}, and they were never "
        "alike since this job was started. No further version is taken while that is so, as each "
        "rank stores a part of it: what is restored would be a mixture, the state of no rank. "
        f"{then.marked}. {back}What to do: wrap the model in DistributedDataParallel (under "
        "Horovod: hvd.DistributedOptimizer), or all_reduce each gradient before the optimizer's "
        "step; and have all ranks begin with the same weights. What is to differ from rank to rank "
        f"is named in the setting forward_changes (here: {own!r}): of that each rank stores its own"
    )


def drifted(finding: Finding, then: Consequences) -> str:
    """Of ranks that were alike."""
    stopped = "No further version is taken while that is so. " if finding.apart else ""
    return (
        f"replicas differ: {finding.text()}. {stopped}{then.marked}: parts of each come from ranks "
        f"that differ. To go back: {then.way_back}. To find the cause: "
        f"{_cause(finding, then.nodes)}"
    )


def parted(finding: Finding, then: Consequences, at: str, missing: Sequence[int]) -> str:
    """Of ranks that make different numbers of optimizer steps; `at` says where this rank is."""
    who = "some rank has"
    if missing:
        who = f"{_ranks(missing)} {'has' if len(missing) == 1 else 'have'}"
    return (
        f"ranks make different numbers of optimizer steps: {at}, and {who} not come to the "
        f"boundary of v{finding.version}. No further version is taken until restore(), and ranks "
        "do not agree on signals and halt requests any more; the training goes on. "
        f"{then.marked}. To go back: {then.way_back}. To find the cause: "
        f"{_cause(finding, then.nodes)}"
    )


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {some(numbers, MOST_RANKS)}"


def _cause(finding: Finding, nodes: Sequence[str]) -> str:
    if finding.apart:
        return (
            "some rank skips an optimizer step that others make (its loss was not finite?). Have "
            "all ranks decide that together: all_reduce what they decide by"
        )
    if finding.structure:
        return (
            "parameters or optimizer state were created, or removed, on some ranks only: look for "
            "code that not all ranks run"
        )
    many = finding.odd is None and finding.ranks > MOST_RANKS
    ranks = range(finding.ranks) if finding.odd is None else finding.odd
    where = _where(ranks, nodes)
    if finding.odd is not None and where:
        where += ". "
    elif where:
        where = f"no majority tells which rank is wrong{'' if many else f' ({where})'}. "
    return (
        f"{where}Should the same node be named again after a restart, test its memory and devices "
        "(ECC errors: nvidia-smi -q -d ECC, edac-util -v), and start again without it. Should "
        "another be named, look for code that changes weights or optimizer state on some ranks only"
    )


def _where(ranks: Sequence[int], nodes: Sequence[str]) -> str:
    known = [rank for rank in ranks if rank < len(nodes)]
    # A node's name is its host's, and then what tells containers apart.
    hosts = [nodes[rank].partition("/")[0] for rank in known]
    told = [f"rank {rank} runs on {host}" for rank, host in zip(known, hosts, strict=True)]
    return some(told, MOST_RANKS)


__all__ = ["Consequences", "drifted", "never_alike"]
