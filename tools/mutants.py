"""A fixed random set of mutants, small faults in the product, and the tests that notice each:
mutants.py choose | run [N] | check [N].

`choose` draws the set from the present source. `run` tries the first N of which the record,
tests/mutants.json, knows nothing, and writes what became of them. `check` tries the first N killed
ones again, writes nothing, and ends with status 1 if one lives.

The product is copied with the whole set inside, each mutant behind a switch. One process imports
this copy and collects the tests, then forks for each trial: no trial imports anything again. All
tests run once without a mutant; the switch notes in shared memory which mutants' places a test
reaches, in whatever process of it. A mutant is tried with the tests that reach it, the quickest
first, until one fails.

A test that fails without any mutant, or takes long, is not used. Outside of tests/unit, where the
pace of processes may have a say, a test has to fail twice to kill.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
from mutation import (
    COUNT,
    ROOT,
    SWITCH,
    Mutant,
    choose,
    located,
    read_record,
    with_mutants,
    write_record,
)

TESTED = ("core", "storage", "agent", "coordination", "restore", "snapshot", "checkpointer", "peer")
"""The folders of tests/unit and tests/store with the tests that are used."""
CPU_SECONDS = 6.0
"""Of a test that is used, at most."""
FILE_CPU_SECONDS = 12.0
"""Of a file's tests that are used, in their order; without a limit in tests/unit."""
FILE_SECONDS = 60.0
MUTANT_SECONDS = 90.0
"""Of the tests that are tried on one mutant, as long as they took without."""
PATIENCE_SECONDS = 30.0
"""For a test with a mutant, beyond five times what it took without."""
LEAK_PATIENCE_SECONDS = 10.0
"""For what a test with a mutant leaves behind."""

SWITCH_MODULE = f"""
import mmap, pathlib

_FOLDER = pathlib.Path(__file__).resolve().parents[2]
with open(_FOLDER / "reached", "r+b") as _file:
    reached = mmap.mmap(_file.fileno(), 0)
on_trial = int((_FOLDER / "on_trial").read_text())


def {SWITCH}(number):
    reached[number] = 1
    return number == on_trial
"""
NONE = -1
"""The number on trial without a mutant."""


@dataclass(frozen=True)
class Outcome:
    """Of one test. `passed` is None if it did not end in time."""

    test: str
    passed: bool | None
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    """With that of processes which it ended."""
    reached: tuple[int, ...] = ()


def try_mutants(
    mutants: Sequence[Mutant],
    numbers: Sequence[int],
    minutes: float,
    known: Callable[[int, Mutant], None],
) -> None:
    """Try some mutants of a record, in this order, and pass each with its fate to `known`. After
    `minutes`, no other is begun. Half of this time is for the tests without a mutant: if it does
    not suffice, the mutants that live stay unknown."""
    start = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="mutants-", dir="/dev/shm") as copy,
        tempfile.TemporaryDirectory(prefix="mutants-") as temporary,
    ):
        present = _make_copy(Path(copy), mutants)
        os.chdir(copy)
        sys.path[:0] = [copy, f"{copy}/common"]
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
        folders = [f"tests/{tier}/{folder}" for tier in ("unit", "store") for folder in TESTED]
        options = ["-q", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout=0"]
        options += [f"--basetemp={temporary}/tests", "-o", "faulthandler_timeout=0"]
        loop = _Loop(mutants, present, numbers, start, 60 * minutes, known)
        status = pytest.main([*options, *filter(os.path.isdir, folders)], plugins=[loop])
        os.chdir("/")
    if status:
        raise SystemExit(f"pytest ended with status {status}")


def _make_copy(copy: Path, mutants: Sequence[Mutant]) -> set[int]:
    """Copy what git tracks, and compiled modules; put in the mutants that the present source has.
    Returns their numbers."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.check_output(listing, cwd=ROOT, text=True).splitlines()
    compiled = [str(path.relative_to(ROOT)) for path in (ROOT / "common").rglob("*.so")]
    for name in [*listed, *compiled]:
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    present: set[int] = set()
    for module, (tree, chosen) in located(mutants).items():
        (copy / module).write_text(with_mutants(tree, chosen, "tierckpt._mutants"))
        present |= chosen.keys()
    (copy / "common/tierckpt/_mutants.py").write_text(SWITCH_MODULE)
    (copy / "reached").write_bytes(bytes(len(mutants)))
    (copy / "on_trial").write_text(str(NONE))
    return present


class _Loop:
    """A plugin that runs trials in place of pytest's loop over all tests. Only `_outcomes` runs
    tests, each time in a forked process."""

    def __init__(
        self,
        mutants: Sequence[Mutant],
        present: set[int],
        numbers: Sequence[int],
        start: float,
        seconds: float,
        known: Callable[[int, Mutant], None],
    ) -> None:
        self._mutants = mutants
        self._present = present
        self._numbers = numbers
        self._deadline = start + seconds
        self._usual_deadline = start + seconds / 2
        self._known = known
        self._items: dict[str, pytest.Item] = {}
        self._all_known = True
        """False if some tests have not been run without a mutant."""
        self._failed = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Interrupted("some tests could not be collected")
        self._items = {item.nodeid: item for item in session.items}
        for number in self._numbers:
            if time.monotonic() > self._deadline:
                break
            mutant = self._fate(number)
            if self._all_known or mutant.status in ("killed", "gone"):
                self._known(number, mutant)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed |= report.failed

    # --- without a mutant ------------------------------------------------------------------------

    @functools.cached_property
    def _usual(self) -> list[Outcome]:
        """Of the tests that are used, the quickest first. Those of an earlier call serve for files
        of tests that are as they were, while all beside them is."""
        kept = ROOT / "build" / "mutants.json"
        kept.parent.mkdir(exist_ok=True)
        known = json.loads(kept.read_text()) if kept.exists() else {}
        common = self._digest()
        usual: list[Outcome] = []
        for path, items in itertools.groupby(self._items.values(), lambda item: item.path):
            key = f"{path.relative_to(Path.cwd())} {_digest([path], common)}"
            if key not in known and time.monotonic() > self._usual_deadline:
                self._all_known = False
                continue
            if key not in known:
                print(f"without a mutant: {key}", flush=True)
                outcomes = self._usual_of_file([item.nodeid for item in items])
                known[key] = [asdict(outcome) for outcome in outcomes]
                kept.write_text(json.dumps(known))
            usual += [Outcome(**each) for each in known[key]]
        usual = [each for each in usual if each.passed and each.cpu_seconds <= CPU_SECONDS]
        return sorted(usual, key=lambda each: each.seconds)

    def _usual_of_file(self, tests: list[str]) -> list[Outcome]:
        """Of the tests of one file, until its time is over."""
        seconds = cpu_seconds = 0.0
        limited = not tests[0].startswith("tests/unit/")
        over = False

        def stop(outcome: Outcome) -> bool:
            nonlocal seconds, cpu_seconds, over
            seconds += outcome.seconds
            cpu_seconds += outcome.cpu_seconds
            over = limited and (seconds > FILE_SECONDS or cpu_seconds > FILE_CPU_SECONDS)
            return over

        found: list[Outcome] = []
        while len(found) < len(tests) and not over:
            rest = tests[len(found) :]
            found += self._outcomes(NONE, rest, dict.fromkeys(rest, 2 * FILE_SECONDS), stop)
        return found

    def _digest(self) -> str:
        """Of all that decides which mutants a test reaches, beside the test's own file."""
        paths = [*Path("common").rglob("*.py"), *Path("tests").rglob("*.py")]
        return _digest([path for path in paths if not path.name.startswith("test_")], "")

    # --- with a mutant ---------------------------------------------------------------------------

    def _fate(self, number: int) -> Mutant:
        """The mutant with its status, after a trial."""
        mutant = self._mutants[number].place
        if number not in self._present:
            return replace(mutant, status="gone")
        before = self._mutants[number].by
        if before in self._items and self._kills(number, before):
            return replace(mutant, status="killed", by=before, tests=1)
        limits: dict[str, float] = {}
        seconds = 0.0
        for each in self._usual:
            if number in each.reached and seconds + each.seconds <= MUTANT_SECONDS:
                limits[each.test] = PATIENCE_SECONDS + 5 * each.seconds
                seconds += each.seconds
        # The unit tests of its own folder first.
        folder = f"tests/unit/{mutant.module.split('/')[2]}/"
        tests = sorted(limits, key=lambda test: not test.startswith(folder))
        status = "survived" if tests else "unreached"
        tried = 0
        while tests:
            outcomes = self._outcomes(number, tests, limits, _failed)
            tests = tests[len(outcomes) :]
            tried += len(outcomes)
            outcome = outcomes[-1]
            # In a unit test, the pace of processes has no say.
            certain = outcome.test.startswith("tests/unit/")
            if outcome.passed is None:
                return replace(mutant, status="timeout", by=outcome.test, tests=tried)
            if not outcome.passed and (certain or self._kills(number, outcome.test)):
                return replace(mutant, status="killed", by=outcome.test, tests=tried)
        return replace(mutant, status=status, tests=tried)

    def _kills(self, number: int, test: str) -> bool:
        """True if a test fails with a mutant."""
        outcomes = self._outcomes(number, [test], {test: 2 * PATIENCE_SECONDS}, _failed)
        return outcomes[0].passed is False

    # --- tests in a forked process ---------------------------------------------------------------

    def _outcomes(
        self,
        number: int,
        tests: list[str],
        limits: dict[str, float],
        stop: Callable[[Outcome], bool],
    ) -> list[Outcome]:
        """Run tests with the mutant of a number on trial, at least one, until `stop`. Those after
        one that ends the process or does not end in time are not run, either."""
        Path("on_trial").write_text(str(number))
        found: list[Outcome] = []
        reading, writing = os.pipe()
        sys.stdout.flush()
        process = os.fork()
        if not process:
            self._run(number, tests, writing)
        try:
            os.close(writing)
            with open(reading, "rb", buffering=0) as pipe:
                for test in tests:
                    if not select.select([pipe], [], [], limits[test])[0]:
                        found.append(Outcome(test, None, limits[test]))
                        break
                    line = pipe.readline()
                    found.append(Outcome(**json.loads(line)) if line else Outcome(test, False))
                    if not line or stop(found[-1]):
                        break
        finally:
            _end_all(process)
            os.waitpid(process, 0)
        return found

    def _run(self, number: int, tests: list[str], writing: int) -> None:
        """In the forked process, which ends here."""
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        log = os.open("log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        switch = sys.modules["tierckpt._mutants"]
        switch.on_trial = number  # type: ignore[attr-defined]
        sys.modules["tests.conftest"].PATIENCE_SECONDS = LEAK_PATIENCE_SECONDS  # type: ignore[attr-defined]
        with contextlib.suppress(BaseException):
            items = [self._items[test] for test in tests]
            for item, following in itertools.pairwise([*items, None]):
                assert item is not None
                switch.reached[:] = bytes(len(self._mutants))
                self._failed = False
                start, cpu_start = time.monotonic(), sum(os.times()[:4])
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                seconds = round(time.monotonic() - start, 3)
                reached = tuple(i for i, byte in enumerate(switch.reached[:]) if byte)
                cpu = round(sum(os.times()[:4]) - cpu_start, 3)
                outcome = Outcome(item.nodeid, not self._failed, seconds, cpu, reached)
                os.write(writing, (json.dumps(asdict(outcome)) + "\n").encode())
        os._exit(0)


def _failed(outcome: Outcome) -> bool:
    return not outcome.passed


def _digest(paths: list[Path], before: str) -> str:
    digest = hashlib.sha256(before.encode())
    for path in sorted(paths):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _end_all(leader: int) -> None:
    """Kill the processes of a session, and others that its tests started."""
    mark = f"PYTEST_TIERCKPT_RUN={os.environ['PYTEST_TIERCKPT_RUN']}".encode()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if int(pid) != os.getpid() and (
                os.getsid(int(pid)) == leader or mark in Path(f"/proc/{pid}/environ").read_bytes()
            ):
                os.kill(int(pid), signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=["choose", "run", "check"])
    parser.add_argument("count", type=int, nargs="?", default=COUNT, help="mutants to try")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin none later")
    arguments = parser.parse_args()
    # Whatever is running then is ended, and the copy removed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if arguments.action == "choose":
        write_record(choose())
        return 0
    mutants = read_record()
    wanted = "not run" if arguments.action == "run" else "killed"
    numbers = [number for number, mutant in enumerate(mutants) if mutant.status == wanted]
    fates: list[str] = []

    def known(number: int, mutant: Mutant) -> None:
        print(number, mutant.status, mutant.module, repr(mutant.line), mutant.by, flush=True)
        fates.append(mutant.status)
        if arguments.action == "run":
            mutants[number] = mutant
            write_record(mutants)

    try_mutants(tuple(mutants), numbers[: arguments.count], arguments.minutes, known)
    print(", ".join(f"{count} {status}" for status, count in Counter(fates).items()))
    return int(arguments.action == "check" and any(status != "killed" for status in fates))


if __name__ == "__main__":
    sys.exit(main())
