"""What the product makes of a golden directory: restarts, lists, verdicts, the state without a job.

`Restart` is also what the file of expectations has, so tests need no code of a case.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import shutil
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import tierckpt
from tests.golden.archive import ARCHIVES, Places, unpack
from tests.golden.job import FILES, Job, environment, rank_and_size
from tests.support import exact
from tierckpt.files import Files

NOT_KEPT = ("created_seconds", "places", "run_id")
"""Of a line of `tierckpt list`: times, paths, and what is drawn."""


def ready(case: Mapping[str, Any], places: Places, edits: Sequence[Sequence[Any]] = ()) -> None:
    """Unpack the files of a case, and change them; skip the test where a package is missing."""
    for package in case["needs"]:
        pytest.importorskip(package)
    unpack(ARCHIVES / f"{case['case']}.tar.xz", places)
    change(places, edits)


# --- changes to an unpacked directory ------------------------------------------------------------


def change(places: Places, edits: Sequence[Sequence[Any]]) -> None:
    """What happened to the files since they were written: `[kind, glob, ...]` each. The glob must
    match."""
    for kind, pattern, *arguments in edits:
        if kind == "write":
            target = {"root": places.root, "shm": places.shm}[pattern.partition("/")[0]]
            (target / pattern.partition("/")[2]).write_text(arguments[0])
            continue
        top, _, inside = pattern.partition("/")
        folder = {"root": places.root, "shm": places.shm}[top]
        found = sorted(folder.glob(inside)) if inside else [folder]
        assert found, f"nothing to {kind}: {pattern}"
        for path in found:
            EDITS[kind](path, *arguments)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def _empty(path: Path) -> None:
    for each in path.iterdir():
        _remove(each)


def _flip(path: Path, offset: int) -> None:
    """Change a bit of the byte at `offset`; a negative one counts from the end."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def _cut(path: Path, nbytes: int) -> None:
    os.truncate(path, path.stat().st_size - nbytes)


def _set(path: Path, offset: int, values: list[int]) -> None:
    content = bytearray(path.read_bytes())
    content[offset : offset + len(values)] = bytes(values)
    path.write_bytes(content)


def _rename(path: Path, name: str) -> None:
    path.rename(path.with_name(name.replace("*", path.name)))


EDITS = {
    "remove": _remove,
    "empty": _empty,
    "flip": _flip,
    "cut": _cut,
    "rename": _rename,
    "set": _set,
}


# --- restarts ------------------------------------------------------------------------------------


def settings_here(settings: Mapping[str, Any], places: Places, rank: int) -> dict[str, Any]:
    """Settings of an expectation, for a rank."""
    here = json.loads(places.here(json.dumps(settings)))
    if isinstance(node := here.get("node"), list):
        here["node"] = node[rank]
    return dict(here)


def restart(
    model: str,
    adapter: str,
    settings: Mapping[str, Any],
    places: Places,
    call: Mapping[str, Any],
    variables: Mapping[str, str],
    then: str = "",
) -> dict[str, Any]:
    """Restore on this rank, among all; what came back, or the name of the error. `then`: what the
    job does afterwards, see `_train_on`."""
    with environment(variables):
        here = settings_here(settings, places, rank_and_size(adapter)[0])
        call = json.loads(places.here(json.dumps(call)))
        if model == FILES:
            return _restart_files(here)
        job = Job(model, adapter, 99, here)
        before = job.image()
        try:
            restored = job.ckpt.restore(**call)
        except tierckpt.TierckptError as error:
            unchanged = job.image() == before
            job.ckpt.abandon()
            return {"error": type(error).__name__, "unchanged": unchanged}
        found: dict[str, Any] = {
            "iteration": int(restored),
            "version": restored.version,
            "generation": restored.generation,
            "levels": dict(sorted(restored.levels.items())),
            "rejected": len(restored.rejected),
            "image": job.image(),
        }
        if restored.base is not None:
            found |= {"base": restored.base.version, "replayed": restored.replayed}
        if restored.unrepeated:
            found["unrepeated"] = True
        if restored.forked_from:
            found["forked_from"] = places.general(restored.forked_from)
        if restored.suspect:
            found["suspect"] = True
        if restored.partial is not None:
            found["loaded"] = sorted(restored.partial.loaded)
            found["kept"] = sorted(restored.partial.kept)
        if then:
            job.iteration = int(restored)
            found["then"] = _train_on(job, then)
        job.ckpt.abandon()
        if then.startswith("save"):
            lines = listed([here["path"]], places)["versions"]
            found["then"] = [{k: v for k, v in x.items() if k != "nbytes"} for x in lines]
        return found


def _restart_files(settings: Mapping[str, Any]) -> dict[str, Any]:
    files = Files(**settings)
    restored = files.restore()
    assert restored is not None
    contents = {name: Path(path).read_bytes() for name, path in restored.items()}
    files.abandon()
    return {
        "version": restored.number,
        "name": restored.name,
        "levels": restored.levels,
        "image": {f"file {name}": exact.digest(content) for name, content in contents.items()},
    }


def _train_on(job: Job, then: str) -> Any:
    if then == "exit":  # a request to halt is seen at most two boundaries later
        seen = []
        for _ in range(3):
            job.iterate()
            job.ckpt.step()
            seen.append(job.ckpt.should_exit())
        return any(seen)
    steps = {"save": 1, "save 3": 3}[then]
    for _ in range(steps):
        job.iterate()
        job.ckpt.step()
        job.ckpt.save(now=True)
    return None


# --- without a job -------------------------------------------------------------------------------


def command(*arguments: str) -> tuple[int, str]:
    """Exit status and output of `python -m tierckpt ARGUMENTS`, in this process."""
    out, errors = io.StringIO(), io.StringIO()
    status: Any = 0
    with (
        mock.patch.object(sys, "argv", ["tierckpt", *arguments]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", RuntimeWarning)  # of runpy: the module may be imported
        try:
            runpy.run_module("tierckpt", run_name="__main__", alter_sys=False)
        except SystemExit as end:
            status = end.code
    return int(status or 0), out.getvalue() or errors.getvalue()


def listed(paths: Sequence[str], places: Places) -> dict[str, Any]:
    """What `tierckpt list --json` says, without times, paths and names that are drawn."""
    status, text = command("list", "--json", *(places.here(p) for p in paths))
    said = json.loads(text)
    rows = []
    for row in said["versions"]:
        kept = {k: v for k, v in row.items() if k not in NOT_KEPT and v not in (None, "", [])}
        rows.append(json.loads(places.general(json.dumps(kept))))
    found = {"versions": rows, "problems": len(said["problems"]), "status": status}
    return found | ({"journal": said["journal"]} if said["journal"] else {})


def verified(paths: Sequence[str], places: Places) -> dict[str, Any]:
    """What `tierckpt verify` says of each version and level, and its status."""
    status, text = command("verify", *(places.here(p) for p in paths))
    lines = [line for line in places.general(text).splitlines() if re.match(r"v\d", line)]
    return {"status": status, "lines": lines}


def loaded(paths: Sequence[str], places: Places) -> dict[str, Any]:
    """The version that `tierckpt.load` takes, and digests of the tensors of its model."""
    here = [places.here(p) for p in paths]
    saved = tierckpt.load(here if here[1:] else here[0])
    return {
        "version": saved.version,
        "iteration": saved.iteration,
        "model": {name: exact.digest(exact.image(v)) for name, v in saved.model.items()},
    }


def look(
    paths: Sequence[str], places: Places, variables: Mapping[str, str], loads: bool
) -> dict[str, Any]:
    """All of the above, of one list of paths."""
    with environment({"TIERCKPT_SHM_DIR": str(places.shm), **variables}):
        return {
            "list": listed(paths, places),
            "verify": verified(paths, places),
            "load": loaded(paths, places) if loads else None,
        }


def shared_and_own(images: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Digests of all ranks, those that are equal on all ranks only once."""
    first = images[0]
    shared = {n for n in first if all(each.get(n) == first[n] for each in images)}
    own = [{n: d for n, d in sorted(each.items()) if n not in shared} for each in images]
    return {"all": {n: first[n] for n in sorted(shared)}, "ranks": own if any(own) else []}


def put_together(told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all ranks say of a restart, as in a file of expectations. Raises AssertionError if they
    do not agree about anything but their own state."""
    same = [{k: v for k, v in each.items() if k != "image"} for each in told]
    assert all(each == same[0] for each in same), same
    if "error" in same[0]:
        return same[0]
    return {**same[0], "state": shared_and_own([each["image"] for each in told])}


def cases_in(folder: Path) -> list[dict[str, Any]]:
    """All expectations, by name; restarts have their states."""
    found = []
    for path in sorted(folder.glob("*.json")):
        case = {"case": path.stem, **json.loads(path.read_text())}
        states = case.pop("states")
        for each in case["restarts"]:
            if "state" in each["gives"]:
                each["gives"]["state"] = states[each["gives"]["state"]]
        found.append(case)
    return found


CASES = cases_in(ARCHIVES)


def restarts_of(*adapters: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The restarts by these adapters, those of equal ranks together, as parameters of a test."""
    found = [(case, each) for case in CASES for each in case["restarts"]]
    chosen = [(case, each) for case, each in found if each["adapter"] in adapters]
    return sorted(chosen, key=lambda pair: (pair[1]["adapter"], pair[1]["ranks"]))


def name_of(value: Mapping[str, Any]) -> str:
    """Part of the id of a test."""
    return str(value["case"] if "case" in value else value["name"]).replace(" ", "_")
