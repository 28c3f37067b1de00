"""What all frameworks' killed jobs must do."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tests.support.crash.launcher import quiet_environment
from tests.support.frameworks.jobs import Job, Run
from tests.support.frameworks.scenario import VARIABLE
from tests.support.warm_python.servers import THROUGHOUT


def resumes_exactly(job: Job, kills: Sequence[str], plain: Run, start: str = "") -> None:
    """Run a job, kill it at all these points, then run it to its end; assert that every run writes
    what `plain` has there. `start`: name of a point before the first version."""
    for number, kill in enumerate([*kills, ""]):
        run = job.start(kill)
        assert job.fired(kill) or not kill, run.output()
        assert run.ended() is not bool(kill), run.output()
        starts = number == 0 or (number == 1 and bool(start) and start in kills[0])
        for rank in range(run.scenario.ranks):
            first = run.place_in(plain, rank)
            assert first == 0 if starts else first > 0, run.output()


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


def ends_by_a_signal_and_resumes(job: Job, signal: str, steps: tuple[int, int], plain: Run) -> None:
    """Send the signal; assert that the job ends after one of `steps` (both included), and that its
    next run resumes exactly after that step."""
    first = job.start(signal=signal)
    assert first.ended(), first.output()
    assert job.fired(signal)
    last = first.of_kind("step")[-1]["number"]
    assert steps[0] <= last <= steps[1], "all ranks know of it after two boundaries"
    again = job.start()
    assert again.ended(), again.output()
    assert again.of_kind("step")[0]["number"] == last + 1
    for rank in range(2):
        assert again.place_in(plain, rank) > 0


def resumes_after_an_error(job: Job, point: str, plain: Run) -> None:
    """Raise an error of the script's on rank 1; assert that the next run resumes exactly."""
    failed = job.start(point, error=True)
    assert failed.error(1) == "the script's own error", failed.output()
    again = job.start()
    assert again.ended(), again.output()
    assert all(again.place_in(plain, rank) > 0 for rank in range(2))


def goes_back_once(job: Job, kills: tuple[str, str], version: int, plain: Run) -> None:
    """Kill the job; go back to `version` by the environment, and kill it again; assert that the
    next start, in the same environment, continues from where the second run was."""
    assert not job.start(kills[0]).ended()
    environment = {"TIERCKPT_ROLLBACK_TO": str(version)}
    back = job.start(kills[1], environment)
    assert job.fired(kills[1]), back.output()
    again = job.start("", environment)
    assert again.ended(), again.output()
    first = [run.of_kind("step")[0]["number"] for run in (back, again)]
    last = back.of_kind("step")[-1]["number"]
    assert first[0] == version + 1, back.output()
    assert version + 1 < first[1] <= last + 1, again.output()
    for rank in range(2):
        assert 0 < back.place_in(plain, rank) < again.place_in(plain, rank)


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


def resumes_with_the_same_samples(killed: Run, other: Run, whole: Run, steps_an_epoch: int) -> None:
    """Assert that `other`, with another number of ranks than the job that was killed, trains on the
    samples that `whole` has in the same steps. The last step of an epoch may be filled up with
    samples of the epoch."""
    steps, taken = samples_of_steps(whole), samples_of_steps(other)
    before = samples_of_steps(killed)
    first = min(taken)
    assert 0 < first <= max(before) + 1
    assert all(samples <= steps[step] for step, samples in before.items())
    assert taken.keys() == {step for step in steps if step >= first}
    for step, samples in taken.items():
        epoch = range(step // steps_an_epoch * steps_an_epoch, step)
        filling = {number for each in epoch for number in steps[each]}
        assert samples - filling == steps[step] - filling, f"step {step}"


def refuses_other_data(job: Job, kill: str, data: str, why: str) -> None:
    """Kill the job, and start it again with other data; assert that no rank makes a step."""
    assert not job.start(kill).ended()
    again = job.start(data=data)
    assert job.fired(kill)
    assert not again.of_kind("step", 0) + again.of_kind("step", 1), again.output()
    assert "RestoreError: " in again.output()
    assert why in again.output()


def samples_of_steps(run: Run) -> dict[int, set[int]]:
    """The numbers of all ranks' samples, by the number of steps made before."""
    found: dict[int, set[int]] = {}
    for rank in range(run.scenario.ranks):
        for line in run.of_kind("batch", rank):
            found.setdefault(line["step"], set()).update(line["numbers"])
    return found


__all__ = [
    "a_fork_continues_exactly",
    "ends_by_a_signal_and_resumes",
    "refuses_other_data",
    "resumes_after_an_error",
    "resumes_exactly",
    "resumes_under_a_launcher",
    "resumes_with_the_same_samples",
]
