"""The oldest supported Lightning, Accelerate and Transformers: `make oldest-frameworks`.

Each one is installed into an environment of its own, which sees all other packages of this Python,
and a few tests of its integration run there. The newest versions are those of the gate.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.packages import ROOT, Environment
from tierckpt._version import ACCELERATE, LIGHTNING, PACKAGES, TRANSFORMERS

FOLDER = ROOT / "build" / "oldest-frameworks"
KILLED = "test_resuming.py::test_a_killed_job_resumes_exactly"
TESTS = {
    LIGHTNING: [
        "tests/unit/lightning",
        f"tests/dist/lightning/{KILLED}[every phase]",
        f"tests/dist/lightning/{KILLED}[a combined loader of the script's, LoRA, fp16]",
        f"tests/dist/lightning/{KILLED}[own generators, manual optimization]",
        f"tests/dist/lightning/{KILLED}[stateful loader, early stopping]",
    ],
    ACCELERATE: [
        "tests/unit/accelerate",
        f"tests/dist/accelerate/{KILLED}[every phase]",
        f"tests/dist/accelerate/{KILLED}[accumulation, two models]",
        f"tests/dist/accelerate/{KILLED}[dispatched and split, last batches dropped]",
        f"tests/dist/accelerate/{KILLED}[stateful loader]",
    ],
    TRANSFORMERS: [
        f"tests/dist/transformers/{KILLED}[every phase]",
        f"tests/dist/transformers/{KILLED}[accumulation, clipping, a limit of steps]",
        f"tests/dist/transformers/{KILLED}[early stopping, LoRA]",
    ],
}


def requirements(framework: tuple[str, str, str]) -> list[str]:
    """The distributions of a framework, pinned to its oldest version."""
    _, oldest, _ = framework
    return [f"{name}=={oldest}.0" for name, each in PACKAGES.items() if each is framework]


def environment_of(framework: tuple[str, str, str]) -> Path:
    """The Python of an environment with the oldest version; made once."""
    name, oldest, _ = framework
    folder = FOLDER / f"{name}-{oldest}"
    mark = folder / "complete"
    if not mark.exists():
        made = Environment(folder)
        made.install(*requirements(framework), missing_requirements=True)
        mark.touch()
    return folder / "bin" / "python"


def main() -> int:
    """Run the tests of all frameworks; returns the exit status."""
    paths = [str(ROOT), str(ROOT / "common"), os.environ.get("PYTHONPATH", "")]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    failed = []
    for framework, tests in TESTS.items():
        pins = " ".join(requirements(framework))
        print(f"[oldest] {pins}", flush=True)
        command = [str(environment_of(framework)), "-m", "pytest", "-q", *tests]
        if subprocess.run(command, cwd=ROOT, env=variables).returncode:
            failed.append(pins)
    if failed:
        print(f"[oldest] FAILED: {', '.join(failed)}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
