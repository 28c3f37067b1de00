"""What the jobs of all frameworks must do that end early."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.support.crash.launcher import quiet_environment
from tests.support.frameworks.jobs import Job, Run
from tests.support.frameworks.scenario import VARIABLE
from tests.support.warm_python.servers import THROUGHOUT

OTHER_DATA = "on ranks 0, 1 of 2: its data after the restore"


@dataclass(frozen=True)
class Case:
    """A job that ends early several times."""

    scenario: dict[str, Any]
    ends: tuple[str, ...]
    """The ends of its runs, one after the other: `POINT`, where a rank is killed, `SIGTERM at
    POINT`, or `error at POINT`, an exception of the script's. A further run trains to the end."""
    restarts: dict[str, Any] = field(default_factory=dict)
    """What the scenario of the runs after the first one has in another way."""
    from_the_start: int = 1
    """The number of runs that start with the first step, as there is no version yet."""
    says: str = ""
    """Is in the output of the last run."""
    finished: tuple[str, ...] = ()
    """What one more run of the finished job writes: kinds of lines. Empty: there is none."""


def resumes_exactly(job: Job, case: Case, plain: Run) -> None:
    """Run the job until its last end; assert that every run writes what `plain` has there."""
    due = 0
    for number, end in enumerate([*case.ends, ""]):
        how, _, point = end.rpartition(" at ")
        order = {"signal": point} if how == "SIGTERM" else {"kill": point, "error": how == "error"}
        run = job.start(**order, **(case.restarts if number else {}))
        assert job.fired(point) or not point, run.output()
        assert run.ended() is (how == "SIGTERM" or not end), run.output()
        for rank in range(run.scenario.ranks):
            first = run.place_in(plain, rank, up_to_its_last_step=how == "SIGTERM")
            assert (first == 0) is (number < case.from_the_start), run.output()
        if how == "error":
            assert run.error(int(point.split(":")[1])) == "the script's own error", run.output()
        if due:
            assert run.of_kind("step")[0]["number"] == due, run.output()
        due = ended_after(run, point) + 1 if how == "SIGTERM" else 0
    assert case.says in run.output()
    if case.finished:
        again = job.start(**case.restarts)
        assert [line["kind"] for line in again.lines()] == [*case.finished], again.output()
        assert again.lines()[-1] == run.lines()[-1]


def ended_after(run: Run, point: str) -> int:
    """The last step of a run that got a signal: all ranks know of it after two boundaries."""
    last, sent_after = run.of_kind("step")[-1]["number"], int(point.rpartition(":")[2])
    assert sent_after + 1 <= last <= sent_after + 4, run.output()
    return int(last)


def resumes_under_a_launcher(
    command: Sequence[str], job: Job, kill: str, plain: Run, environment: Mapping[str, str]
) -> None:
    """Run the job by a command that starts killed ranks again; assert that the second attempt
    writes what `plain` has there."""
    scenario = replace(job.scenario, kill=kill)
    told = {**quiet_environment(), **THROUGHOUT, **environment, VARIABLE: scenario.to_json()}
    done = subprocess.run(command, env=told, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert job.fired(kill)
    first, second = attempts(Run(scenario), plain)
    assert first == 0
    assert second > 0


def attempts(run: Run, undisturbed: Run) -> list[int]:
    """For rank 0, the places in the undisturbed job at which the attempts of one run started; they
    write to one file."""
    theirs = undisturbed.lines()
    at, found = len(theirs), []
    for line in [x for x in run.lines() if x["kind"] != "raised"]:
        if at == len(theirs) or line != theirs[at]:
            at = theirs.index(line)
            found.append(at)
        at += 1
    assert at == len(theirs)
    return found


def a_fork_continues_exactly(source: Job, fork: Job, kills: tuple[str, str], plain: Run) -> None:
    """Kill `source`; start `fork` where that was, by the environment, kill it before it has a
    version of its own on disk, and run it to its end. Assert that both write what `plain` has."""
    assert not source.start(kills[0]).ended()
    path = (source.scenario.settings or {})["path"]
    environment = {"TIERCKPT_FORK_FROM": path}
    for kill in (kills[1], ""):
        run = fork.start(kill, environment)
        assert run.ended() is not bool(kill), run.output()
        assert fork.fired(kill) or not kill, run.output()
        assert all(run.place_in(plain, rank) > 0 for rank in range(2)), run.output()
    assert [*Path(path).glob("*.fork")], "it has versions of its own"
    assert not [*Path(path).glob("*.hold")]


def is_refused(job: Job, *words: str, before: str = "batch", **changes: Any) -> None:
    """Start a killed job with these changes; assert that no rank comes to its first line of the
    kind `before`, and that the error has these words."""
    run = job.start(**changes)
    lines = [line for rank in range(run.scenario.ranks) for line in run.of_kind(before, rank)]
    assert not lines, run.output()
    for each in words:
        assert each in run.output(), run.output()


def trains_on_the_samples(run: Run, whole: Run, steps_an_epoch: int, after: int = -1) -> int:
    """Assert that a run, with another number of ranks than the one before it, which was killed in
    the step after `after`, trains on the samples that `whole` has in the same steps; returns its
    own last step. The last step of an epoch may be filled up with samples of the epoch."""
    steps, taken = samples_of_steps(whole), samples_of_steps(run)
    first, last = min(taken), max(taken)
    assert first == 0 if after < 0 else 0 < first <= after + 1, run.output()
    assert taken.keys() == {step for step in steps if first <= step <= last}
    assert not run.ended() or last == max(steps)
    for step, samples in taken.items():
        epoch = range(step // steps_an_epoch * steps_an_epoch, step)
        filling = {number for each in epoch for number in steps[each]}
        if step < last or run.ended():
            assert samples - filling == steps[step] - filling, f"step {step}"
        assert samples - filling <= steps[step], f"step {step}"
    return last


def samples_of_steps(run: Run) -> dict[int, set[int]]:
    """The numbers of all ranks' samples, by the number of steps made before."""
    found: dict[int, set[int]] = {}
    for rank in range(run.scenario.ranks):
        for line in run.of_kind("batch", rank):
            found.setdefault(line["step"], set()).update(line["numbers"])
    return found


__all__ = [
    "OTHER_DATA",
    "Case",
    "a_fork_continues_exactly",
    "is_refused",
    "resumes_exactly",
    "resumes_under_a_launcher",
    "trains_on_the_samples",
]
