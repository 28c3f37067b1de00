"""Start of the servers that fork Python (`server.py`), for the tests of one run of pytest.

As a program, it runs a command whose `python`, `torchrun` and `horovodrun` they fork.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
PYTHON = str(HERE / "python")
"""Replaces `sys.executable` in commands; it is fast only under `warm_python`."""
THROUGHOUT = {
    "WARM_PYTHON_EXECUTABLE": PYTHON,
    "PATH": f"{HERE}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
}
"""An environment in which it also replaces `sys.executable` in its child processes, and the
`python`, `torchrun` and `horovodrun` that scripts call."""
os.environ["WARM_PYTHON"] = sys.executable
SERVERS = 2
"""Hash seeds of ranks."""
LIGHTNING, TRANSFORMERS = (
    {"WARM_PYTHON_FRAMEWORK": x} for x in ("lightning.pytorch", "transformers.trainer")
)
"""Environments in which PYTHON has imported that framework, too: two to three seconds more."""
ROOM = 60_000 * "-"
"""Room for the command and the environment of a fork."""


@contextlib.contextmanager
def warm_python() -> Iterator[None]:
    """Serve forks for PYTHON as long as this lasts, also in workers of pytest-xdist that the caller
    starts, which need no servers of their own."""
    if "WARM_PYTHON_SERVERS" in os.environ:
        yield
        return
    if "COVERAGE_PROCESS_CONFIG" in os.environ or "COVERAGE_PROCESS_START" in os.environ:
        yield  # this measures started programs, not forks
        return
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="warm-"))
        names = [f"{folder}/{i}" for i in range(SERVERS)]
        for name in names:
            stack.enter_context(_server(name))
            for (framework,) in (LIGHTNING.values(), TRANSFORMERS.values()):
                stack.enter_context(_server(f"{name}.{framework}", framework))
        os.environ["WARM_PYTHON_SERVERS"] = " ".join(names)
        yield
        del os.environ["WARM_PYTHON_SERVERS"]


@contextlib.contextmanager
def _server(name: str, framework: str = "") -> Iterator[None]:
    """One with a framework imports nothing before its first client comes."""
    with socket.socket(socket.AF_UNIX) as listener, open(f"{name}.log", "wb") as log:
        listener.bind(name)
        listener.listen(128)
        command = [sys.executable, "-E", "-s", str(HERE / "server.py")]
        process = subprocess.Popen(
            [*command, str(listener.fileno()), framework, ROOM],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=[listener.fileno()],
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "ROOM": ROOM},
        )
    assert process.stdin is not None
    yield
    process.stdin.close()
    process.wait()


if __name__ == "__main__":
    with warm_python():
        sys.exit(subprocess.call(sys.argv[1:], env={**os.environ, **THROUGHOUT}))
