"""Event traces: what jobs report, step by step, as an earlier Tierckpt reported it.

`python -m tests.golden.traces NAME...` writes the traces of new jobs to traces.json; an existing
one is never written again for a change of the product.

Each job waits after every step until nothing is under way, so its events have one order. Numbers
that vary are left out of the texts.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tierckpt
from tests.support.parts import halt_after
from tierckpt.testing import ThreadGroup, run_ranks

RECORD = Path(__file__).with_suffix(".json")
QUIET_SECONDS = 60.0
Events = list[str]


class Place:
    """Where a job has its levels."""

    def __init__(self, root: Path, shm: Path) -> None:
        self.root, self.shm = root, shm
        self.path, self.far = root / "disk", root / "far"

    def lose(self, *levels: str) -> None:
        """Lose what is on these levels."""
        for level in levels:
            there = {"memory": self.shm, "local": self.path, "persistent": self.far}[level]
            for each in [*there.iterdir()] if there.exists() else ():
                shutil.rmtree(each) if each.is_dir() else each.unlink()

    def text(self, text: str) -> str:
        """Without what differs from run to run."""
        for path in (self.root, self.shm):
            text = text.replace(str(path), "@")
        text = re.sub(r"process \d+ on \S+", "process # on #", text)
        text = re.sub(r"\b[0-9a-f]{8,}\b", "#", text)
        return re.sub(r"\b\d+(\.\d+)? ?(s|ms|bytes|B|kB|MB|GB|steps/s)\b", "# \\2", text)


class Job:
    """One run of a small job on one rank. The model is linear; a step needs no random numbers."""

    def __init__(self, place: Place, group: Any = None, **settings: Any) -> None:
        self.place, self.events = place, list[tierckpt.Event]()
        self.rank, self.size = (group.rank, group.size) if group else (0, 1)
        self.group = group
        self.net = torch.nn.Linear(4, 3)
        with torch.no_grad():
            for param in self.net.parameters():
                param.copy_(torch.arange(param.numel()).reshape(param.shape) / 10)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9)
        defaults = {
            "path": place.path if group is None else f"{place.path}/n{self.rank}",
            "shm_dir": place.shm,
            "agent": "inline",
            "halt_signals": "",
            "when_busy": "wait",
            "local_every_steps": 1,
            "local_every_seconds": 0,
        }
        if group is not None:
            defaults["node"] = f"n{self.rank}"
        self.ckpt = tierckpt.Checkpointer(
            self.net,
            self.optimizer,
            group=group,
            on_event=self.events.append,
            **{**defaults, **settings},
        )
        if group is not None:
            group.all_gather_object(None)

    def restore(self, *arguments: Any, **options: Any) -> Job:
        self.ckpt.restore(*arguments, **options)
        self._settle()
        return self

    def run(self, until: int, then: Callable[[Job], object] = lambda job: None) -> Job:
        """Train until so many steps are made; `then` is called after each."""
        while self.ckpt.version < until and not self.ckpt.should_exit():
            self.optimizer.zero_grad()
            self.net(torch.full((2, 4), 1.0 + self.ckpt.version)).square().mean().backward()
            self.optimizer.step()
            self.ckpt.step()
            self._settle()
            then(self)
        return self

    def _settle(self) -> None:
        self.ckpt.wait()
        self.ckpt._agent.wait(QUIET_SECONDS, everything=True)
        self.ckpt._levels.collect()

    def end(self, how: str = "close") -> Events:
        """End it, and return what it has reported."""
        if self.group is not None:
            self.group.all_gather_object(None)
        getattr(self.ckpt, how)()
        lines = [self._line(event) for event in self.events]
        # A flush ends beside later steps.
        flushed = [line for line in lines if re.match(r"committed v\d+ persistent", line)]
        return [line for line in lines if line not in flushed] + sorted(flushed)

    def _line(self, event: tierckpt.Event) -> str:
        if self.size > 1 and (event.name, event.level) == ("committed", "persistent"):
            return f"committed v{event.version} persistent"  # any node may be the last
        severity = logging.getLevelName(event.severity)
        about = f"{event.name} v{event.version} {event.level or '-'} {severity}"
        return f"{about} {self.place.text(event.message)}".rstrip()


def far(place: Place, **settings: Any) -> dict[str, Any]:
    return {"persistent_path": place.far, "persistent_every_steps": 2, **settings}


def killed(place: Place, *lost: str, **settings: Any) -> Events:
    """A job is killed after five steps, loses levels, and continues."""
    first = Job(place, **settings).run(5).end("abandon")
    place.lose(*lost)
    return [*first, "--", *Job(place, **settings).restore().run(7).end()]


def measured(job: Job) -> None:
    job.ckpt.metric = (3, 1, 2, 5, 4, 6)[job.ckpt.version % 6]


def best(place: Place) -> Events:
    settings = {"local_keep": "1, best 1"}
    job = Job(place, **settings)
    measured(job)
    return job.run(8, measured).end()


def gone_back(place: Place) -> Events:
    first = Job(place, local_keep=5).run(5).end("abandon")
    job = Job(place, local_keep=5).restore().run(7).restore(4).run(6)
    return [*first, "--", *job.end()]


def rolled_back(place: Place) -> Events:
    first = Job(place, local_keep=5).run(5).end()
    return [*first, "--", *Job(place, local_keep=5, rollback_to=3).restore().run(5).end()]


def on_demand(place: Place) -> Events:
    def then(job: Job) -> None:
        if job.ckpt.version == 2:
            job.ckpt.save()
        if job.ckpt.version == 5:
            job.ckpt.save(now=True)

    return Job(place, memory_every_steps=0, local_every_steps=0).run(7, then).end()


def pinned(place: Place) -> Events:
    def then(job: Job) -> None:
        if job.ckpt.version == 3:
            job.ckpt.pin(3)
        if job.ckpt.version == 7:
            job.ckpt.unpin(3)

    return Job(place, local_keep=1).run(9, then).end()


def forked(place: Place) -> Events:
    first = Job(place).run(4).end()
    job = Job(place, path=place.root / "fork").restore(fork_from=place.path).run(6)
    return [*first, "--", *job.end()]


def parts_taken(place: Place) -> Events:
    first = Job(place).run(4).end()
    job = Job(place, path=place.root / "fork").restore(fork_from=place.path, only="model").run(2)
    job.ckpt.load_from(place.path, only="model")
    return [*first, "--", *job.run(4).end()]


def journalled(place: Place) -> Events:
    settings = {"local_journal_steps": 10, "memory_every_steps": 0, "local_every_steps": 4}
    first = Job(place, **settings).run(6).end("abandon")
    place.lose("memory")
    return [*first, "--", *Job(place, **settings).restore().run(9).end()]


def halted(place: Place) -> Events:
    job = Job(place)
    halt_after(job.ckpt, 4)
    first = job.run(9).end()
    return [*first, "--", *Job(place).restore().run(7).end()]


def not_stored(place: Place) -> Events:
    job = Job(place).run(3)
    job.optimizer.param_groups[0]["odd"] = object()
    job.run(5)
    del job.optimizer.param_groups[0]["odd"]
    return job.run(7).end()


def fresh_beside(place: Place) -> Events:
    return [*Job(place).run(4).end(), "--", *Job(place).run(2).end()]


def unchanged(place: Place) -> Events:
    job = Job(place)
    job.net.requires_grad_(False)
    while job.ckpt.version < 5:
        job.optimizer.step()
        job.ckpt.step()
        job._settle()
    return job.end()


def of_ranks(place: Place, size: int, program: Callable[[Any], Events]) -> Events:
    told = run_ranks(size, program)
    return [line for rank, lines in enumerate(told) for line in (f"rank {rank}:", *lines)]


def of_two_ranks(place: Place) -> Events:
    def program(group: ThreadGroup) -> Events:
        return Job(place, group).run(4).end("abandon")

    def again(group: ThreadGroup) -> Events:
        return Job(place, group).restore().run(6).end()

    first = of_ranks(place, 2, program)
    place.lose("memory")
    return [*first, "--", *of_ranks(place, 2, again)]


def of_fewer_ranks(place: Place) -> Events:
    def program(group: ThreadGroup) -> Events:
        return Job(place, group, **far(place)).run(4).end("abandon")

    def again(group: ThreadGroup) -> Events:
        return Job(place, group, **far(place)).restore().run(6).end()

    return [*of_ranks(place, 3, program), "--", *of_ranks(place, 2, again)]


def of_ranks_that_differ(place: Place) -> Events:
    def program(group: ThreadGroup) -> Events:
        def flip(job: Job) -> None:
            if job.ckpt.version == 6 and job.rank == 1:
                job.net.weight.detach()[0, 1] += 1

        settings = {"replicas": "warn every 2", "local_keep": 9, "slots": 3}
        return Job(place, group, **settings).run(12, flip).end()

    return of_ranks(place, 3, program)


JOBS: dict[str, Callable[[Place], Events]] = {
    "every step on both levels": lambda place: Job(place).run(6).end(),
    "every third step on disk": lambda place: Job(place, local_every_steps=3).run(8).end(),
    "memory alone": lambda place: Job(place, local_every_steps=0).run(4).end(),
    "three levels": lambda place: Job(place, **far(place)).run(7).end(),
    "one version far away": lambda place: Job(place, **far(place, persistent_keep=1)).run(7).end(),
    "milestones": lambda place: Job(place, local_keep="1, every 3").run(9).end(),
    "the best versions": best,
    "killed": killed,
    "killed, memory lost": lambda place: killed(place, "memory"),
    "killed, memory and disk lost": lambda place: killed(place, "memory", "local", **far(place)),
    "gone back": gone_back,
    "rolled back": rolled_back,
    "on demand": on_demand,
    "pinned": pinned,
    "forked": forked,
    "parts of another job": parts_taken,
    "a journal": journalled,
    "halted": halted,
    "a state that cannot be stored": not_stored,
    "afresh beside old versions": fresh_beside,
    "nothing changes": unchanged,
    "two ranks": of_two_ranks,
    "fewer ranks": of_fewer_ranks,
    "ranks that differ": of_ranks_that_differ,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Record the traces of new jobs.")
    parser.add_argument("names", nargs="*", help="default: all that are not there")
    names = parser.parse_args().names
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for name in names or [name for name in JOBS if name not in record]:
        with (
            tempfile.TemporaryDirectory() as root,
            tempfile.TemporaryDirectory(dir="/dev/shm") as shm,
        ):
            record[name] = JOBS[name](Place(Path(root), Path(shm)))
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
