"""Drift: what follows when replicas differ, for versions and in words for operators.

A thread marks the versions that may be mixtures, wherever they are, so that a disk or store that
hangs delays nothing. Retention always keeps one version that is known to be equal on all ranks: a
difference is seen up to one round of looks late, and then all newer versions may be suspect.

The texts name the difference, its consequences, and what to do; they are pure.
"""

from __future__ import annotations

import contextlib
import logging
import shlex
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tierckpt._text import some
from tierckpt.config import Config
from tierckpt.coordination.agreement import Agreement
from tierckpt.coordination.job_history import JobHistory
from tierckpt.coordination.versions import Reports
from tierckpt.core.replica_check import Finding
from tierckpt.format.ids import VersionId
from tierckpt.group import Group, Node
from tierckpt.state.entry_names import parameter_of
from tierckpt.storage.job_directory import JobDirectory
from tierckpt.storage.local import LocalStore
from tierckpt.storage.marks import SuspectMarks
from tierckpt.storage.persistent import PersistentStore

__all__ = ["Consequences", "Drift", "Spared", "drifted", "never_alike"]


MAX_RANKS = 4
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


def text_of_divergence(
    finding: Finding, then: Consequences, at: str, missing: Sequence[int]
) -> str:
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
    return f"rank{'s' if len(numbers) > 1 else ''} {some(numbers, MAX_RANKS)}"


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
    many = finding.odd is None and finding.ranks > MAX_RANKS
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
    return some(places, MAX_RANKS)


MARKS_SECONDS = 10.0
"""Time to wait for the marks when the job ends because of them."""


class Spared:
    """The versions of the local level that retention must keep: the newest that is known to be
    equal on all ranks, and its successor, for which that is not known yet. The same on all ranks.
    Training thread."""

    def __init__(self, active: bool = False) -> None:
        """Not `active`: replicas are not compared, and no version is kept."""
        self.version: VersionId | None = None
        """The newest version known to be equal on all ranks."""
        self._next: VersionId | None = None
        self._newest: VersionId | None = None
        self._active, self._drifted = active, False

    def restart(self, version: VersionId | None) -> None:
        """A run begins; `version` is the newest one that is not suspect. It is kept until another
        version is known to be equal: if ranks differ from the first step on, there is no other."""
        self.version = version if self._active else None
        self._next, self._drifted = None, False
        self._newest = None

    def whole(self, id_: VersionId) -> None:
        """A version is complete on all local disks."""
        if self._active and not self._drifted:
            self._newest, self._next = id_, self._next or id_

    def alike(self, generation: int, version: int) -> None:
        """All ranks were equal up to this version."""
        last = VersionId(generation, version)
        if self._newest is not None and self._newest <= last:
            self._next = self._newest
        if self._next is not None and self._next <= last:
            self.version, self._next = self._next, None
        self._drifted = False

    def drifted(self) -> None:
        """Replicas differ: the successor may be a mixture, and so may later versions, until all are
        equal."""
        self._newest = self._next = None
        self._drifted = True

    @property
    def versions(self) -> set[VersionId]:
        """The versions that retention must keep."""
        return {id_ for id_ in (self.version, self._next) if id_ is not None}


class Drift:
    """One rank's part. The constructor's arguments stay their owners'. Training thread."""

    def __init__(
        self,
        config: Config,
        group: Group,
        node: Node,
        job: JobDirectory,
        history: JobHistory,
        agreement: Agreement,
        spared: Spared,
        reports: Reports,
    ) -> None:
        self._config, self._group, self._job = config, group, job
        self._is_first = node.first == group.rank
        self._history, self._agreement, self._spared = history, agreement, spared
        self._reports = reports
        self._thread: threading.Thread | None = None

    def alike(self, version: int) -> None:
        """All ranks were equal at that version of this run."""
        self._spared.alike(self._history.generation, version)

    def found(self, finding: Finding) -> Consequences:
        """Mark the versions that may be mixtures; returns the consequences in words."""
        agreement, history = self._agreement, self._history
        self._spared.drifted()
        known = {id_ for ledger in agreement.ledgers.values() for id_ in ledger.open}
        known |= {id_ for id_ in (agreement.memory.safe, agreement.local.safe) if id_ is not None}
        clean = finding.clean if finding.clean is not None else history.began_at
        self._begin(known, clean, finding.text())
        marked = f"Versions after v{clean} are marked as suspect"
        if finding.clean is None:
            marked = "Versions taken before this was known are marked as suspect"
        return Consequences(marked, self._way_back(), history.began_at > 0, history.nodes)

    def _way_back(self) -> str:
        where = self._config.directory
        if (clean := self._spared.version) is not None:
            how = (
                f"with restore(version={clean.version}); or with "
                'on_drift="stop" (TIERCKPT_ON_DRIFT=stop), and restore() takes it by itself'
            )
            if self._config.on_drift == "stop":
                how = 'and restore() takes it by itself, as on_drift is "stop"'
            return (
                f"v{clean.version} is the newest version on disk that is known to be equal on all "
                f"ranks. Restart the job {how}"
            )
        return (
            "no version on the nodes' disks is known to be equal on all ranks. To list other "
            f"versions and their marks: tierckpt list {shlex.quote(where)}"
        )

    def _begin(self, ids: Iterable[VersionId], clean: int, text: str) -> None:
        run_id = self._history.name
        suspects = {i for i in ids if self._history.is_own(i.generation) and i.version > clean}

        def work() -> None:
            try:
                if self._is_first:
                    self._mark_here(suspects, clean, text)
                if self._group.rank == 0 and self._config.persistent.path:
                    self._mark_there(clean, run_id, text)
            except Exception as error:
                why = f"suspect versions could not be marked: {error}"
                self._reports.notice_later(why, logging.ERROR)

        self._thread = threading.Thread(target=work, name="tierckpt-suspects", daemon=True)
        with contextlib.suppress(RuntimeError):  # the system's limit of threads is reached
            self._thread.start()

    def _mark_here(self, ids: set[VersionId], clean: int, text: str) -> None:
        """Mark versions in this node's memory and on its disk, and those on the way there."""
        in_memory = {manifest.id for _, manifest in self._job.sealed()}
        on_disk = set[VersionId]()
        if self._config.uses("local"):
            keys = LocalStore(self._config.directory).keys()
            on_disk = {key.id for key in keys}
        every, is_own = in_memory | on_disk, self._history.is_own
        seen = {i for i in every if is_own(i.generation) and i.version > clean}
        for folder in (self._job.path, Path(self._config.directory)):
            SuspectMarks(folder).add(ids | seen, text)

    def _mark_there(self, clean: int, run_id: str, text: str) -> None:
        """Mark versions on the persistent level. Later arrivals are marked by the agent that writes
        them."""
        persistent = self._config.persistent
        with contextlib.closing(PersistentStore(persistent.path, **persistent.options())) as store:
            for name in store.versions():
                of_us = self._history.is_own(name.id.generation) and name.run_id == run_id
                if of_us and name.id.version > clean:
                    store.mark_suspect(name, text.encode())

    def wait(self, timeout_seconds: float = MARKS_SECONDS) -> None:
        """Wait until the marks are written, or the time is over."""
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(timeout_seconds)
