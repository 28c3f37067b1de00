"""Two ranks of one node, as another process sees them, and in a terminal."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.support.training import Place, attach, make_job, rank, train

STEPS = 6
WATCH = (sys.executable, "-m", "tierckpt", "watch")
BEGIN, END = b"\x1b[?1049h", b"\x1b[?1049l"
"""A terminal's other screen, and back; rich shows and hides the cursor besides."""


def watched(place: Place, events: str) -> tuple[str, str, int] | None:
    """Rank 0 starts the watchers: JSON, a picture in a terminal, and its exit status."""
    job = make_job()
    attached = attach(job, place, local_every_steps=3, when_busy="wait", events_dir=events)
    train(job, attached.ckpt, range(STEPS))
    attached.ckpt.wait()
    dist.barrier()
    found = None
    if rank() == 0:
        os.environ["TIERCKPT_SHM_DIR"] = place.shm
        command = [*WATCH, place.path, "--once", "--json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found = (done.stdout, *in_terminal([*WATCH, place.path, "--interval-seconds", "0.1"]))
    dist.barrier()
    attached.ckpt.close()
    return found


def in_terminal(command: list[str]) -> tuple[str, int]:
    """The output until a second picture has come and Ctrl-C was pressed, and the exit status."""
    control, terminal = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "40"}
    process = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env=env, start_new_session=True
    )
    os.close(terminal)
    output = b""
    while output.count(b"job ckpts") < 2 and select.select([control], [], [], 60)[0]:
        output += os.read(control, 1 << 16)
    process.send_signal(signal.SIGINT)
    try:
        while part := os.read(control, 1 << 16):
            output += part
    except OSError:  # the other end was closed
        pass
    os.close(control)
    return output.decode(errors="replace"), process.wait(60)


def test_a_job_of_two_ranks(ranks: Any, tmp_path: Path, shm_dir: Path) -> None:
    place = Place.under(tmp_path, shm_dir)
    (text, picture, status), nothing = ranks(2).run(watched, place, str(tmp_path / "events"))
    assert nothing is None
    view = json.loads(text)
    assert (view["job"]["state"], view["job"]["trainers_here"]) == ("runs", 2)
    levels = {each["level"]: each for each in view["levels"]}
    assert {name: each["shards_seen"] for name, each in levels.items()} == {"memory": 2, "local": 2}
    [agent] = view["agents"]
    assert agent["trainers"] == [0, 1]
    assert (view["events"]["files"], view["events"]["counts"]["sealed/memory"]) == (2, STEPS)
    assert {each["work"]: each["ranks"] for each in view["events"]["slow"]} == {
        "stall": 2,
        "local": 2,
    }

    assert status == 130
    assert BEGIN.decode() in picture
    assert picture.rstrip().endswith(END.decode())
    assert "\x1b[?25h" in picture[picture.rindex("job ckpts") :], "the cursor is back"
    assert "ranks 0, 1" in picture
    assert "Traceback" not in picture
