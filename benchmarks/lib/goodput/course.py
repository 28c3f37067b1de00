"""The course of a job that was killed again and again: which steps count, what a failure cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import dropwhile

from lib.jobs.plan import Plan, lines_of


@dataclass(frozen=True)
class Step:
    """A complete step, or the begin of a run from `version`, on rank 0. `run` counts from 0."""

    run: int
    version: int
    seconds: float
    began: bool = False


@dataclass
class Course:
    """The course of a job. Times are those of the day.

    end_seconds: the time of its end. wall_seconds: the duration since it first was ready to train.
    useful: steps that count in the end. made: all steps. back_seconds: for each failure, the time
    until the first step after it was complete.
    """

    end_seconds: float
    steps: list[Step]
    kills: list[float] = field(default_factory=list)

    @property
    def wall_seconds(self) -> float:
        return self.end_seconds - self.steps[0].seconds if self.steps else 0.0

    @property
    def useful(self) -> int:
        return self.steps[-1].version if self.steps else 0

    @property
    def made(self) -> int:
        return sum(not step.began for step in self.steps)

    @property
    def back_seconds(self) -> list[float]:
        found = []
        for kill in self.kills:
            # A surviving rank may still record a step that was complete before the kill.
            later = dropwhile(lambda s, k=kill: not (s.began and s.seconds > k), self.steps)
            first = next((step.seconds for step in later if not step.began), None)
            found += [first - kill] if first else []
        return found

    def last_run(self) -> list[float]:
        """The times at which the steps of the last run were complete."""
        last = max((step.run for step in self.steps), default=0)
        return [step.seconds for step in self.steps if step.run == last and not step.began]


def steps_of(plan: Plan) -> list[Step]:
    """The steps in the log of rank 0."""
    found, run = [], -1
    for line in lines_of(plan, 0):
        if "begun" in line:
            run += 1
            found.append(Step(run, line["resumed_from"], line["restored"], began=True))
        elif "step" in line:
            found.append(Step(run, line["step"], line["end"]))
    return found


def stall_of(plan: Plan) -> float:
    """The seconds for which a version stalled the training, as the job reports at its end."""
    return float(next((line["stall"] for line in lines_of(plan, 0) if "stall" in line), 0.0))
