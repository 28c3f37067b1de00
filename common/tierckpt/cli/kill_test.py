"""The test of `tierckpt prove`: the runs of a script, undisturbed and killed, and the verdict.

This module imports torch, so `prove` imports it when the test starts.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from tierckpt._text import counted, some
from tierckpt.coordination.proof_order import KEPT as KEPT_FOLDER
from tierckpt.coordination.proof_order import SEED, ProofOrder
from tierckpt.proof import verdict
from tierckpt.proof.runs import Bar, ProveError, Run, link_all, version_in
from tierckpt.proof.verdict import Departure, IncomparableError, Request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console


KEPT = 2
"""A job that starts from scratch is compared with one that starts from its own version of this
number or the next. Random streams without a seed (numpy's) therefore make no difference."""
MIN_BEFORE = 3
"""Steps before the kill: two until all ranks know that a version is complete, and one more."""

JOURNAL_ENDS = "the journal ends at"
"""Part of the notice that a journal has stopped."""


class Plan(Struct, frozen=True):
    """One test, as requested on the command line."""

    command: tuple[str, ...]
    folder: Path
    start: int
    """The version that all runs start from; 0: the first run starts from scratch."""
    kill_after: int
    steps: int
    patience_seconds: float
    console: Console

    @property
    def request(self) -> Request:
        """The numbers of the request."""
        return Request(self.start, self.kill_after, self.steps)

    @property
    def kill_at(self) -> int:
        """The version of the boundary where the second run is killed."""
        return self.start + self.kill_after

    @property
    def seed(self) -> Path:
        """The folder with the version that later runs start from, laid out like a run's own
        folder."""
        return self.folder / "undisturbed" / KEPT_FOLDER

    def first(self, may_end_early: bool) -> Run:
        """Carry out the undisturbed run, see `Run.may_end_early`."""
        until = self.kill_at + self.steps
        order = ProofOrder(self.folder / "undisturbed", until, None if self.start else KEPT)
        order.write()
        if self.start:
            link_all(self.folder / SEED, order.folder / SEED)
        run = self._carry_out(order, may_end_early)
        starts = {each.restored or 0 for record in run.records.values() for each in record.firsts()}
        if starts != {self.start} and starts != {0}:
            raise ProveError(
                f"{run.name} started at version {some(sorted(starts))} instead of {self.start}; "
                f"see {run.log}"
            )
        return run

    def again(self, name: str, until: int, kill: bool = False) -> Run:
        """Carry out a run that starts from the seed, or from the version that the first run
        kept."""
        taken = len([*self.folder.glob(f"{name}*")])
        folder = self.folder / (f"{name}{taken + 1}" if taken else name)
        order = ProofOrder(folder, until, None, self.kill_at if kill else None)
        order.write()
        if self.start:
            link_all(self.folder / SEED, order.folder / SEED)
        else:
            link_all(self.seed, order.folder)
        return self._carry_out(order)

    def _carry_out(self, order: ProofOrder, may_end_early: bool = False) -> Run:
        name = order.folder.name
        with Bar(name, self.start, order.until, self.console) as bar:
            run = Run(f"the {name} run", order, self.command, self.patience_seconds, bar.step)
            run.may_end_early = may_end_early
            run.carry_out()
        return run


def judge(plan: Plan, epochs: bool) -> int:
    """Carry out the runs, and print the verdict; returns 0 if the script is exact, 1 if not. Raises
    ProveError if the test gave no result."""
    calm = plan.first(epochs)
    if epochs and (longer := _over_epochs(plan, calm)) is not plan:
        calm.order.folder.rename(plan.folder / "pace")
        plan = longer
        calm = plan.first(epochs)
        _refuse_short(calm, plan)
    if not plan.start and version_in(plan.seed) is None:
        raise ProveError(f"{calm.name} kept no version to start from; see {calm.log}")
    killed = plan.again("killed", calm.order.until, kill=True)
    if calm.records.keys() != killed.records.keys():
        raise ProveError("the two runs do not have the same checkpointers")
    try:
        return max(_Judge(plan, job, calm, killed).judge() for job in calm.records)
    except IncomparableError as error:
        raise ProveError(f"{error} ({calm.log}, {killed.log})") from error


def _over_epochs(plan: Plan, calm: Run) -> Plan:
    """A plan with an epoch's end before the kill and another one after it, at the pace of run
    `calm`."""
    runs = [record.firsts()[0] for record in calm.records.values()]
    plans = [verdict.over_epochs(run, plan.request) for run in runs if run.passes]
    feasible = [each for each in plans if each is not None]
    if not feasible:
        raise ProveError(f"--epochs: {calm.name} used no DataLoader of known length")
    longest = max(feasible, key=lambda each: each.kill_after + each.steps)
    if longest == plan.request and calm.order.until == plan.kill_at + plan.steps:
        return plan
    longer = replace(plan, kill_after=longest.kill_after, steps=longest.steps)
    if (last := calm.order.until) < plan.kill_at + plan.steps:  # the whole of a short script
        _refuse_short(calm, longer)
        longer = replace(longer, steps=last - longer.kill_at)
    how = f"--kill-after {longer.kill_after} --steps {longer.steps}"
    plan.console.print(f"for an epoch to end before the kill and one after it: {how}")
    return longer


def _refuse_short(calm: Run, plan: Plan) -> None:
    """Raise ProveError if the script has ended before the kill of this plan."""
    if (last := calm.order.until) <= plan.kill_at:
        raise ProveError(
            f"--epochs: the script ended by itself at version {last}, and an epoch has to end "
            f"before the kill at {plan.kill_at}, with steps after it: let it train for more "
            "epochs, or with fewer batches in each"
        )


class _Judge:
    """The comparison of one checkpointer's runs."""

    def __init__(self, plan: Plan, job: str, calm: Run, killed: Run) -> None:
        self._plan, self._job, self._log = plan, job, killed.log
        self._whole = calm.records[job].by_rank()
        self._first = killed.records[job].by_rank()
        self._last = killed.records[job].by_rank(-1)
        ends = [run.last for run in (*self._whole.values(), *self._last.values())]
        self._until = min(calm.order.until, *ends)
        runs = killed.records[job].all_runs()
        # If there are several checkpointers, one of them carries out the kill.
        at = max((run.killed or 0 for run in runs), default=0)
        self._at = at or 1 + min(run.last for run in self._first.values())
        # Each rank wrote down what all of them had found.
        self._witness = verdict.witness_of(killed.records[job].runs[min(self._whole)])
        if len(calm.records) > 1:
            self._say(f"{calm.records[job].path}:")

    def _say(self, text: str) -> None:
        self._plan.console.print(text, soft_wrap=True)

    def judge(self) -> int:
        """Print the verdict on this checkpointer; returns its exit status."""
        resumed = [run.restored or 0 for run in (*self._first.values(), *self._last.values())]
        if not all(resumed):
            self._say(f"not exact: {verdict.NOT_RESUMED}")
            return 1
        start = max(run.restored or 0 for run in self._first.values())
        resumed_from = max(run.restored or 0 for run in self._last.values())
        how = f"resumed from step {start}"
        before = verdict.common_versions(self._first, start, self._at - 1)
        found = verdict.departure(self._whole, self._first, before)
        if found is None:
            how = f"killed with SIGKILL at step {self._at}, resumed from {resumed_from}"
            if steps := max(run.repeated or 0 for run in self._last.values()):
                how += f" ({counted(steps, 'iteration')} repeated from the journal)"
            after = verdict.common_versions(self._whole, resumed_from, self._until)
            found = verdict.departure(self._whole, self._last, after)
        if found is None and not after:
            raise ProveError(f"no step after {resumed_from} was recorded")
        if found is None and (problem := verdict.journal_problem(self._last.values())):
            self._say(f"not exact, {how}: {problem}")
            for line in self._log.read_text(errors="replace").splitlines():
                if JOURNAL_ENDS in line:
                    self._say(line)
            return 1
        if found is None:
            self._say(self._exact(how, after))
            first = self._whole[min(self._whole)]
            gaps = verdict.coverage_gaps(first, after, self._plan.request)
            for text in (self._witness[0], *gaps, *self._unsaved()):
                self._say(text)
            return 0
        if self._differs_by_itself(found):
            result, why = "not deterministic", verdict.NOT_DETERMINISTIC
        else:
            result, why = f"not exact, {how}", self._witness[1] or verdict.cause(found)
        names = verdict.description(found)
        self._say(f"{result}: step {found.version} is the first that differs, in {names}")
        self._say(why)
        for text in self._unsaved():
            self._say(text)
        return 1

    def _unsaved(self) -> list[str]:
        """Notices about objects of the script that are in no checkpoint, each once."""
        runs = (*self._whole.values(), *self._last.values())
        texts = dict.fromkeys(text for run in runs for text in run.unsaved)
        return [f"not in the checkpoints: {text}" for text in texts]

    def _exact(self, how: str, versions: Sequence[int]) -> str:
        tensors, values = verdict.count_of(self._last, versions[-1])
        ranks = f"{len(self._whole)} rank{'s' if len(self._whole) > 1 else ''}"
        first, last = versions[0], versions[-1]
        steps = f"steps {first} to {last} are" if last > first else f"step {first} is"
        return (
            f"exact: {how}, {steps} bit for bit as in the run that was not killed ({ranks}, "
            f"{tensors} tensors, {values} other values: random streams, options, objects)"
        )

    def _differs_by_itself(self, found: Departure) -> bool:
        """Whether an unkilled run, from where the killed one started, differs as well: from the
        killed run before its kill, else from the undisturbed run."""
        if self._plan.start and found.version < self._at:
            return True  # both started from the same version, and the kill was later
        again = self._plan.again("control", found.version).records[self._job].by_rank()
        other = self._first if found.version < self._at else self._whole
        return verdict.departure(other, again, [found.version]) is not None
