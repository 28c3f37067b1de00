"""Writes golden directories, with today's code: `python -m tests.golden.make [NAME...]`.

A name is one of `cases.py`; without any, those are written that do not exist yet. For each case
the maker runs its jobs, packs what they left, unpacks it elsewhere, restarts from there, and writes
what a restart has to give. Where the undisturbed course of the job shows it, the restart
must have given it, or nothing is written.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from tests.golden.archive import ARCHIVES, Places, pack, unpack
from tests.golden.cases import CASES, Case, Restart, Run, Tool
from tests.golden.job import ALONE, DDP, FILES, HOROVOD, Job, environment, rank_and_size
from tests.golden.reading import (
    change,
    command,
    look,
    put_together,
    restart,
    settings_here,
)
from tests.support import exact
from tests.support.rank_pool import GLOO, HOROVODRUN, RankPool
from tierckpt.files import Files

Course: TypeAlias = dict[int, dict[str, str]]
"""Digests of a rank's state by version."""
ENVIRONMENT = {
    "TIERCKPT_AGENT_LINGER_SECONDS": "0",
    "TIERCKPT_TEST_NICE": "0",
    "OMP_NUM_THREADS": "1",
}
WIDTH = 200
OWN = ("stream", "buffer", "extra")
"""Starts of the names of what each rank has for itself, or may have."""


def leave_behind(
    model: str,
    adapter: str,
    settings: Mapping[str, Any],
    places: Places,
    actions: Sequence[tuple[Any, ...]],
    variables: Mapping[str, str],
) -> Course:
    """Run a job on this rank; returns its course."""
    with environment(variables):
        here = settings_here(settings, places, rank_and_size(adapter)[0])
        if model == FILES:
            return _leave_files(here, actions)
        job = Job(model, adapter, 1, here)
        course: Course = {}
        for action, *arguments in actions:
            _act(job, action, arguments, course, places)
        assert job.ckpt.closed, "the last action is an end"
        return course


def _leave_files(settings: Mapping[str, Any], actions: Sequence[tuple[Any, ...]]) -> Course:
    files, course = Files(**settings), Course()
    for _, number, contents in actions:
        with files.version(number) as version:
            for name, text in contents.items():
                Path(version.route(name)).write_text(text)
        files.wait()
        course[number] = {f"file {n}": exact.digest(t.encode()) for n, t in contents.items()}
    files.abandon()
    return course


def _act(job: Job, action: str, arguments: list[Any], course: Course, places: Places) -> None:
    ckpt = job.ckpt
    if action == "train":
        for number in range(arguments[0]):
            job.iterate()
            ckpt.step(*([arguments[1][number]] if arguments[1:] else []))
            course[ckpt.version] = job.image()
    elif action == "restore":
        call = json.loads(places.here(json.dumps(arguments[0] if arguments else {})))
        job.iteration = int(ckpt.restore(**call))
        course[ckpt.version] = job.image()
    elif action == "save":
        ckpt.save(now=True)
    elif action == "reach":
        job.reached(*arguments)
    elif action == "files":
        job.write_files(*arguments)
    elif action == "meet":
        _meet(job)
    elif action == "reach_on":
        if job.rank in arguments[0]:
            job.reached(*arguments[1:])
    elif action == "tamper":
        if job.rank == arguments[0]:
            with torch.no_grad():
                next(job.bare.parameters()).view(-1)[0] += 1
    elif action == "torch_save":
        names = {"model": job.bare.state_dict(), "optimizer": job.optimizers[0].state_dict()}
        torch.save(names, places.here(arguments[0]))
    elif action == "plain_step":  # an iteration without an optimizer's step
        ckpt.step()
        job.iteration += 1
    elif action == "unfinished":  # an iteration after the last boundary
        job.iterate()
    elif action == "until_exit":
        while not ckpt.should_exit():
            job.iterate()
            ckpt.step()
            course[ckpt.version] = job.image()
    else:
        getattr(ckpt, action)(*arguments)


def _meet(job: Job) -> None:
    if dist.is_initialized():
        dist.barrier()
    elif job.size > 1:
        importlib.import_module("horovod.torch").barrier()


class Maker:
    """Pools of ranks, and the folders of one run of the maker."""

    def __init__(self, folder: Path, memory: Path) -> None:
        self._folder, self._memory = folder, memory
        self._pools: dict[tuple[str, int], RankPool] = {}
        self._made = 0

    def close(self) -> None:
        for pool in self._pools.values():
            pool.kill()

    def places(self) -> Places:
        self._made += 1
        made = Places(self._folder / f"at{self._made}", self._memory / f"at{self._made}")
        made.root.mkdir()
        made.shm.mkdir()
        return made

    def on_ranks(self, adapter: str, ranks: int, what: Callable[..., Any], *args: Any) -> list[Any]:
        key = (adapter, ranks)
        if key not in self._pools:
            home = self._folder / f"{adapter}{ranks}"
            home.mkdir()
            kind = {ALONE: "alone", DDP: GLOO, HOROVOD: HOROVODRUN}[adapter]
            self._pools[key] = RankPool(ranks, home, kind=kind)
        return self._pools[key].run(what, *args)

    def make(self, case: Case) -> dict[str, Any]:
        """Write the archive of a case; returns its expectations."""
        places, courses = self.places(), list[list[Course]]()
        for phase in case.phases:
            if isinstance(phase, Run):
                arguments = (case.model, phase.adapter, phase.settings, places)
                arguments += (phase.actions, phase.variables)  # type: ignore[assignment]
                courses += [self.on_ranks(phase.adapter, phase.ranks, leave_behind, *arguments)]
            elif isinstance(phase, Tool):
                with environment({"TIERCKPT_SHM_DIR": str(places.shm), **phase.variables}):
                    status, said = command(*(places.here(each) for each in phase.arguments))
                assert status == 0, said
            else:
                change(places, phase.edits)
        archive = ARCHIVES / f"{case.name}.tar.xz"
        pack(places, archive)
        seen = self.places()
        unpack(archive, seen)
        looks = []
        for number, paths in enumerate(case.looks):
            variables = {**case.variables, **case.look_variables}
            found = look(paths, seen, variables, number not in case.not_loaded)
            looks.append({"paths": paths, "variables": variables, **found})
        _release(seen)
        _release(places)
        restarts = [self.restart(case, each, courses) for each in case.restarts]
        states = dict[str, Any]()
        for each in restarts:
            if (state := each["gives"].pop("state", None)) is not None:
                each["gives"]["state"] = _named(state, states)
        return {
            "why": case.why,
            "needs": case.needs,
            "looks": looks,
            "restarts": restarts,
            "states": states,
        }

    def restart(self, case: Case, each: Restart, courses: list[list[Course]]) -> dict[str, Any]:
        """Restart twice, and compare with the course; returns the expectation."""
        found = []
        for _ in range(2):
            places = self.places()
            unpack(ARCHIVES / f"{case.name}.tar.xz", places)
            change(places, each.edits)
            variables = {**case.variables, **each.variables}
            arguments = (
                each.model or case.model,
                each.adapter,
                each.settings,
                places,
                each.call,
                variables,
            )
            told = self.on_ranks(each.adapter, each.ranks, restart, *arguments, each.then)
            found.append(put_together(told))
            _release(places)
        assert found[0] == found[1], f"{case.name} {each.name}: not the same twice"
        _check(f"{case.name}, {each.name}", each, told, courses)
        return {
            "name": each.name,
            "edits": each.edits,
            "ranks": each.ranks,
            "adapter": each.adapter,
            "model": each.model or case.model,
            "settings": each.settings,
            "call": each.call,
            "variables": variables,
            "then": each.then,
            "gives": found[0],
        }


def _check(name: str, each: Restart, told: list[Any], courses: list[list[Course]]) -> None:
    """Raise AssertionError unless the restart gave what the undisturbed job had."""
    if isinstance(each.expects, str):
        assert told[0].get("error") == each.expects, f"{name}: {told[0]}"
        assert told[0]["unchanged"], name
        return
    run, version, levels = each.expects
    assert "error" not in told[0], f"{name}: {told[0]}"
    seen = (told[0]["version"], told[0]["levels"])
    assert seen == (version, levels), f"{name}: {seen} in place of {(version, levels)}"
    if each.partly:
        return
    ranks = courses[run]
    for number, mine in enumerate(told):
        was = ranks[number % len(ranks)][version]
        own = len(ranks) == len(told)
        for label, digest in was.items():
            if own or not label.startswith(OWN) or label in each.equal:
                assert mine["image"][label] == digest, f"{name}: rank {number} has another {label}"
        assert was.keys() == mine["image"].keys()


def _named(state: Any, states: dict[str, Any]) -> str:
    """The name of a state among those of the case; equal ones are written once."""
    for name, known in states.items():
        if known == state:
            return name
    name = f"state {len(states) + 1}"
    states[name] = state
    return name


def _text(value: Any, indent: str = "") -> str:
    """JSON with as much on a line as a line has room for."""
    short = json.dumps(value)
    if len(short) + len(indent) < WIDTH or not value or not isinstance(value, dict | list | tuple):
        return short
    inner = indent + " "
    if isinstance(value, dict):
        parts = [f"{json.dumps(k)}: {_text(v, inner)}" for k, v in value.items()]
        return "{\n" + ",\n".join(inner + p for p in parts) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + _text(v, inner) for v in value) + f"\n{indent}]"


def _last(error: Exception) -> str:
    return traceback.format_tb(error.__traceback__)[-1]


def _release(places: Places) -> None:
    shutil.rmtree(places.root)
    shutil.rmtree(places.shm)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="*")
    chosen = parser.parse_args().name
    cases = {case.name: case for case in CASES}
    assert len(cases) == len(CASES)
    ARCHIVES.mkdir(exist_ok=True)
    chosen = chosen or [n for n in cases if not (ARCHIVES / f"{n}.json").exists()]
    os.environ.update(ENVIRONMENT)
    failed = []
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(prefix="tierckpt-golden-", dir="/dev/shm") as memory,
    ):
        os.environ["TIERCKPT_SHM_DIR"] = memory
        maker = Maker(Path(folder), Path(memory))
        try:
            for name in chosen:
                try:
                    made = maker.make(cases[name])
                except Exception as error:
                    print(f"{name}: NOT WRITTEN\n{error}\n{_last(error)}", file=sys.stderr)
                    failed.append(name)
                    continue
                (ARCHIVES / f"{name}.json").write_text(_text(made) + "\n")
                nbytes = (ARCHIVES / f"{name}.tar.xz").stat().st_size
                print(f"{name}: {nbytes} bytes, {len(made['restarts'])} restarts", flush=True)
        finally:
            maker.close()
    if failed:
        sys.exit(f"not written: {', '.join(failed)}")


if __name__ == "__main__":
    from tests.golden.make import main as run  # so that ranks find its functions by module

    run()
