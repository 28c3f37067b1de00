"""Other projects' tests, plain and with Tierckpt: `make suites`, see CONTRIBUTING.md.

Exit status 1 where a test differs and tests/suites/explained.py has no reason for it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.suites.explained import EXPLAINED, REFUSED

Found = dict[str, dict[str, Any]]
"""`outcome`, `why`, and the reports of `ranks`, by test."""
HOROVOD = ("https://github.com/horovod/horovod", "v0.28.1")
SOURCES = {
    "horovod": HOROVOD,
    "elastic": HOROVOD,
    "lightning": ("https://github.com/Lightning-AI/pytorch-lightning", "{}"),
    "accelerate": ("https://github.com/huggingface/accelerate", "v{}"),
    "transformers": ("https://github.com/huggingface/transformers", "v{}"),
}
"""The repository of each suite, and the tag; of frameworks that of the installed version."""
TESTS = {
    "lightning": [
        f"tests/tests_pytorch/{part}" for part in ("trainer", "callbacks", "checkpointing", "loops")
    ],
    "accelerate": ["tests/test_state_checkpointing.py"],
    "transformers": [f"tests/trainer/test_trainer{part}.py" for part in ("", "_checkpointing")],
}
"""The frameworks' tests, which pytest runs."""
LIMIT_SECONDS = 180
"""Time limit of a rank for one test of Horovod's."""
ENDED = {"outcome": "failed", "why": "the process ended before or in this test"}
WORST_FIRST = ("failed", "skipped", "passed")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.suites", description=__doc__)
    parser.add_argument("suites", nargs="*", default=[*EXPLAINED], help=", ".join(EXPLAINED))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3], help="of the DDP tests")
    parser.add_argument("--source", help="a folder with the suite's tests, or a repository")
    parser.add_argument("--tests", nargs="+", default=[], help="only these, by name")
    parser.add_argument("--logs", type=Path, help="where everything that was said is kept")
    args = parser.parse_args()
    unexplained = 0
    with folders(args.logs) as folder:
        for suite in args.suites:
            for ranks in {"ddp": args.ranks, "horovod": [2]}.get(suite, [1]):
                run = runner(suite, ranks, folder, args.source)
                unexplained += compare(suite, ranks, run, args.tests)
    return min(unexplained, 1)


@contextmanager
def folders(logs: Path | None) -> Iterator[Path]:
    """A folder for everything; and one in shared memory, which is removed."""
    shm = tempfile.mkdtemp(prefix="tierckpt-suites-", dir="/dev/shm")
    folder = logs or Path(tempfile.mkdtemp(prefix="tierckpt-suites-"))
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"SHM_DIR": shm, "AGENT": "inline", "LOCAL_EVERY_SECONDS": "0", "HALT_SIGNALS": ""}
    os.environ.update({f"TIERCKPT_{name}": value for name, value in settings.items()})
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield folder.absolute()
    finally:
        shutil.rmtree(shm, ignore_errors=True)
        if logs is None:
            shutil.rmtree(folder, ignore_errors=True)


# --- differences ---------------------------------------------------------------------------------


def compare(
    suite: str, ranks: int, run: Callable[[str, list[str]], Found], names: list[str]
) -> int:
    """Run all tests both ways and print differences. Returns the number of unexplained ones."""
    plain = run("plain", names)
    ours = run("with", [*plain])
    differing = {name: text for name in plain if (text := difference(plain[name], ours[name]))}
    others = [name for name, text in differing.items() if text == OTHER_DIGESTS]
    again = run("plain", others) if others else {}
    reasons = {name: reason(suite, name, text) for name, text in differing.items()}
    for name in others:
        if digests(again[name]) != digests(plain[name]):
            reasons[name] = "two plain runs differ, too"
    if refused := [name for name in differing if reasons[name].startswith(REFUSED)]:
        for name, test in run("cured", refused).items():
            if test["outcome"] != plain[name]["outcome"]:
                differing[name] = f"given what the refusal asks for: {last_line(test['why'])}"
                reasons[name] = reason(suite, name, differing[name])
            else:
                reasons[name] += "; passes when given what that asks for"
    passed = [sum(v["outcome"] == "passed" for v in found.values()) for found in (plain, ours)]
    reports = [rank for test in ours.values() for rank in test.get("ranks", ())]
    print(
        f"\n{suite}, {ranks} ranks: {len(plain)} tests; plain {passed[0]} pass, with Tierckpt "
        f"{passed[1]}; {len(differing)} differ, {list(reasons.values()).count('')} unexplained"
    )
    for what in ("checkpointers", "sealed"):
        if count := sum(rank[what] for rank in reports):
            print(f"  {what}: {count}")
    for name, text in differing.items():
        print(f"  {'explained' if reasons[name] else 'UNEXPLAINED':11} {name}: {text}")
        if reasons[name]:
            print(f"              {reasons[name]}")
    return list(reasons.values()).count("")


OTHER_DIGESTS = "other parameters, gradients or buffers at the end"


def difference(plain: dict[str, Any], ours: dict[str, Any]) -> str:
    """The difference as text; empty if there is none."""
    if plain["outcome"] != ours["outcome"]:
        return f"{ours['outcome']}: {last_line(ours['why'])}"
    if plain["outcome"] == "passed" and digests(plain) != digests(ours):
        return OTHER_DIGESTS
    lost = [text for rank in ours.get("ranks", ()) for text in rank["lost"]]
    return f"a version was lost: {lost[0]}" if lost else ""


def digests(test: dict[str, Any]) -> list[str]:
    return [rank["digest"] for rank in test.get("ranks", ())]


def last_line(traceback: str) -> str:
    """The one that names the exception."""
    lines = [
        line for line in traceback.splitlines() if re.match(r"\w[\w.]*(Error|Exception)\b", line)
    ]
    return (lines or traceback.strip().splitlines() or [""])[-1][:200]


def reason(suite: str, name: str, text: str) -> str:
    for test, says, why in EXPLAINED[suite]:
        if re.fullmatch(test, name) and re.search(says, text):
            return why
    return ""


# --- how they are run ----------------------------------------------------------------------------


def runner(suite: str, ranks: int, folder: Path, given: str | None) -> Callable[..., Found]:
    """Run the tests of these names, or all, "plain", "with" Tierckpt, or "cured": after a refusal,
    its advice is followed."""
    if suite == "ddp":
        return lambda how, names: run_ddp(how, ranks, names, new(folder, f"ddp-{ranks}-{how}"))
    root = source(suite, given)
    if suite in TESTS:
        return lambda how, names: run_pytest(suite, how, root, names, new(folder, suite + how))
    name = "parallel/test_torch.py" if suite == "horovod" else "single/test_torch_elastic.py"
    file = root / "test" / name
    return lambda how, names: run_horovod(how, ranks, file, names, new(folder, f"{suite}-{how}"))


def new(folder: Path, name: str) -> Path:
    made = folder / f"{name}-{time.time_ns()}"
    made.mkdir()
    return made


def source(suite: str, given: str | None) -> Path:
    """The sources of a suite: the given folder, or a clone, made once, in the user's folder
    for caches."""
    repository, tag = SOURCES[suite]
    if given and any((Path(given) / path).exists() for path in TESTS.get(suite, ())):
        return Path(given).absolute()
    if suite in TESTS:
        tag = tag.format(metadata.version(suite))
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = caches / "tierckpt" / f"{Path(repository).name}-{tag}"
    if not (folder / ".git").exists():
        shutil.rmtree(folder, ignore_errors=True)
        clone = ["git", "-c", "advice.detachedHead=false", "clone", "--quiet", "--depth=1"]
        subprocess.run([*clone, f"--branch={tag}", given or repository, str(folder)], check=True)
    return folder


def run_pytest(suite: str, how: str, root: Path, names: list[str], folder: Path) -> Found:
    """Run a framework's tests by pytest, in one process."""
    outcomes = folder / "outcomes.jsonl"
    environment = {
        **os.environ,
        "SUITE_OF": suite,
        "SUITE_HOW": how,
        "SUITE_OUTCOMES": str(outcomes),
        # A project's own package may be named `tests` as well.
        "PYTHONPATH": os.pathsep.join(map(str, [root / "tests", *sys.path, Path(__file__).parent])),
        "TMPDIR": str(folder),
    }
    options = "-q --color=no --continue-on-collection-errors -p no:cacheprovider -p framework_tests"
    paths = [str(root / name) for name in names or TESTS[suite]]
    command = [sys.executable, "-m", "pytest", *options.split(), f"--rootdir={root}"]
    with (folder / "log").open("wb") as log:
        subprocess.run(
            [*command, *paths], env=environment, cwd=root / "tests", stdout=log, stderr=log
        )
    told = [json.loads(line) for line in outcomes.read_text().splitlines()]
    found = {each["test"]: each for each in told}
    return {**{name: ENDED for name in names if "::" in name}, **found}


def run_ddp(how: str, ranks: int, names: list[str], folder: Path) -> Found:
    command = [sys.executable, "-m", "tests.suites.torch_ddp", how, str(folder), *names]
    environment = {
        **os.environ,
        "WORLD_SIZE": str(ranks),
        "BACKEND": "gloo",
        "TEMP_DIR": str(folder),
    }
    with (folder / "log").open("wb") as log:
        subprocess.run(command, env=environment, stdout=log, stderr=log, check=True)
    found: Found = json.loads((folder / "outcomes.json").read_text())
    return found


def run_horovod(how: str, ranks: int, file: Path, names: list[str], folder: Path) -> Found:
    """Run tests in one job, and in one more after each test that ended it."""
    launch = ["horovod.runner.launch", "--gloo", "-np", str(ranks), "--network-interfaces", "lo"]
    found: Found = {}
    while not names or found.keys() < set(names):
        rest = [name for name in names if name not in found]
        job = [sys.executable, "-m", "tests.suites.horovod_job", how, str(file), str(folder), *rest]
        with (folder / "log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *launch, *job], stdout=log, stderr=log
            )
            end = watch(process, folder)
        before, found = len(found), {**outcomes(folder, end), **found}
        if len(found) == before:
            raise RuntimeError(f"no test began: {end}. See {folder / 'log'}")
        names = json.loads((folder / "names.json").read_text())
    return found


def watch(process: subprocess.Popen[bytes], folder: Path) -> str:
    """Wait for the job's end, or for a test that hangs; returns its outcome."""
    while True:
        try:
            return f"the job ended with status {process.wait(timeout=5)}"
        except subprocess.TimeoutExpired:
            ages = [time.time() - path.stat().st_mtime for path in folder.glob("rank-*.jsonl")]
            if ages and min(ages) > LIMIT_SECONDS:
                process.terminate()
                process.wait()
                return f"its ranks waited for more than {LIMIT_SECONDS} s"


def outcomes(folder: Path, end: str) -> Found:
    """The worst result of all ranks. A test that started and did not end has failed: `end`."""
    found: Found = {}
    for path in folder.glob("rank-*.jsonl"):
        of_rank = {}
        for line in path.read_text().splitlines():
            told = json.loads(line)
            of_rank[told["test"]] = {"outcome": "failed", "why": end, **told}
        for name, told in of_rank.items():
            known = found.setdefault(name, told)
            found[name] = min(known, told, key=lambda each: WORST_FIRST.index(each["outcome"]))
    return found


if __name__ == "__main__":
    sys.exit(main())
