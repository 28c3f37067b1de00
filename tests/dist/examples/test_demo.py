"""`make demo` and `make demo-horovod`, as a user runs them, with fewer steps."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.rank_pool import HOROVODRUN
from tests.support.thorough import on_demand
from tests.support.warm_python.servers import PYTHON, THROUGHOUT

ROOT = Path(__file__).resolve().parents[3]
SAME = "loss curves of both ranks in all three runs: equal bit for bit"


@pytest.mark.parametrize(
    "launcher",
    [
        "torchrun",
        pytest.param(
            "horovodrun",
            marks=on_demand(
                "half a minute; the same demo, and Horovod's failures are in tests/crash"
            ),
        ),
    ],
)
def test_a_kill_leaves_the_curve_as_it_was(
    launcher: str, tmp_path: Path, launchable: Callable[[str], None]
) -> None:
    if launcher == "horovodrun":
        launchable(HOROVODRUN)
    picture = tmp_path / "demo.png"
    command = [PYTHON, "examples/digits/demo.py", "--launcher", launcher]
    command += ["--steps", "30", "--picture", str(picture)]
    # Wide enough that no sentence is broken into lines.
    environment = {**os.environ, **THROUGHOUT, "COLUMNS": "200", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert SAME in said
    # The step under way when the kill came, or the one before it, is done again.
    back = re.search(r"killed in step 18, resumed at step (\d+) from memory", said)
    assert back is not None, said
    assert back[1] in ("17", "18"), said
    assert picture.stat().st_size > 0
    assert [path for path in tmp_path.iterdir() if path.name.startswith("tierckpt-demo-")] == []


def test_the_elastic_hosts_are_this_machine_wherever_it_is(tmp_path: Path) -> None:
    """Horovod takes a name that stands for no interface's address for another machine, and a host's
    own name is such a one on Debian: so they are addresses, which no one can resolve otherwise."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    python.chmod(0o755)
    words = subprocess.run(
        [ROOT / "examples/restarts/horovod_elastic.sh"],
        env={**os.environ, "PYTHON": str(python)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    ask = words[words.index("--host-discovery-script") + 1]
    told = subprocess.run(ask, shell=True, check=True, capture_output=True, text=True).stdout
    names = [line.removesuffix(":1") for line in told.splitlines()]
    assert len(set(names)) == 3
    assert {socket.inet_aton(name) for name in names} == {socket.inet_aton("127.0.0.1")}
