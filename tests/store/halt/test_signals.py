"""The receivers of a signal: several checkpointers, the script's handlers, and the process at its
end."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.processes import end, python

pytestmark = pytest.mark.usefixtures("warm_python")


def status_of(program: str, path: Path, shm_dir: Path, *closed: str) -> int:
    """The exit status of a program; negative for a signal."""
    process = python(program, path, shm_dir, *closed, warm=True)
    try:
        return process.wait(120)
    finally:
        end(process)


PROGRAM = """
import os, signal, sys, time
from tierckpt.testing import TinyJob
path, shm_dir, *close = sys.argv[1:]
jobs = [
    TinyJob(f"{path}/{n}", shm_dir=shm_dir, agent="inline", halt_grace_seconds=0.6).run(2)
    for n in range(3)
]
for n in close:
    jobs[int(n)].checkpointer.close()
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""


@pytest.mark.parametrize("closed", ["", "02", "21"])
def test_a_process_that_hangs_ends_at_a_signal(closed: str, path: Path, shm_dir: Path) -> None:
    assert status_of(PROGRAM, path, shm_dir, *closed) == 128 + signal.SIGTERM


BOTH_CLOSED = """
import os, signal, sys, time
from tierckpt.testing import TinyJob
path, shm_dir, *close = sys.argv[1:]
jobs = [TinyJob(f"{path}/{n}", shm_dir=shm_dir, agent="inline").run(2) for n in range(2)]
for n in close:
    jobs[int(n)].checkpointer.close()
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""


def test_after_the_last_end_a_signal_is_the_processs(path: Path, shm_dir: Path) -> None:
    assert status_of(BOTH_CLOSED, path, shm_dir, "1", "0") == -signal.SIGTERM


OWN_HANDLER = """
import os, signal, sys, time
from tierckpt.testing import TinyJob
path, shm_dir = sys.argv[1:]
job = TinyJob(path, shm_dir=shm_dir, agent="inline", halt_grace_seconds=0.6).run(2)
heard = []
signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(2)  # an evaluation, say
job.checkpointer.close()
sys.exit(7 if heard else 1)
"""


def test_a_handler_that_a_script_installs_later_is_obeyed(path: Path, shm_dir: Path) -> None:
    assert status_of(OWN_HANDLER, path, shm_dir) == 7


CLOSED_ELSEWHERE = """
import os, signal, sys, threading
from tierckpt.testing import TinyJob
path, shm_dir = sys.argv[1:]
job = TinyJob(path, shm_dir=shm_dir, agent="inline").run(2)
closing = threading.Thread(target=job.checkpointer.close)
closing.start()
closing.join()
signal.signal(signal.SIGUSR2, lambda *_: None)
files = [open(f"{path}.{n}", "wb", buffering=0) for n in range(64)]
os.kill(os.getpid(), signal.SIGUSR2)
sys.exit(min(1, sum(os.path.getsize(file.name) for file in files)))
"""


def test_closed_on_another_thread_it_writes_to_no_file_of_the_scripts(
    path: Path, shm_dir: Path
) -> None:
    """Python itself writes a byte for each signal to the wakeup descriptor."""
    assert status_of(CLOSED_ELSEWHERE, path, shm_dir) == 0


AGAIN = """
import atexit, builtins, os, signal, sys
from tierckpt.testing import TinyJob
path, shm_dir = sys.argv[1:]

def again():
    os.kill(os.getpid(), signal.SIGTERM)
    print("on", flush=True)

class Last:
    def __init__(self, kill, say):
        self.kill, self.say = kill, say
    def __del__(self):
        self.kill()
        self.say()

job = TinyJob(path, shm_dir=shm_dir, agent="inline").run(2)
assert not job.checkpointer.should_exit()
again()
job.run(4)
assert job.checkpointer.should_exit()
job.checkpointer.close()
again()
atexit.register(again)
builtins.goes_last = Last(
    lambda kill=os.kill, pid=os.getpid(), number=15: kill(pid, number),
    lambda write=os.write: write(1, b"on\\n"),
)
"""


def test_the_same_request_again_is_no_death_after_a_clean_end(path: Path, shm_dir: Path) -> None:
    """Python removes its handlers before everything else."""
    process = python(AGAIN, path, shm_dir)
    try:
        assert process.stdout is not None
        assert process.stdout.read().splitlines() == ["on"] * 4
        assert process.wait(120) == 0
    finally:
        end(process)


STARTING = """
import os, signal, sys, time
from tierckpt.testing import TinyJob
path, shm_dir = sys.argv[1:]
heard = []
signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
job = TinyJob(path, shm_dir=shm_dir, agent="inline")
os.kill(os.getpid(), signal.SIGTERM)
assert heard == [signal.SIGTERM]
time.sleep(3)
job.run(2)
sys.exit(7 if job.checkpointer.should_exit() else 1)
"""


def test_before_the_first_boundary_a_handler_that_returns_leaves_it_to_us(
    path: Path, shm_dir: Path
) -> None:
    """The script wants to continue, however long its first step takes, and to end cleanly."""
    assert status_of(STARTING, path, shm_dir) == 7


BEHIND_A_CLOSED_ONE = """
import os, signal, sys, time
from tierckpt.testing import TinyJob
path, shm_dir = sys.argv[1:]
jobs = [TinyJob(f"{path}/{n}", shm_dir=shm_dir, agent="inline") for n in range(2)]
jobs[0].run(2).checkpointer.close()
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""


def test_the_handler_of_a_closed_one_is_none_of_the_scripts(path: Path, shm_dir: Path) -> None:
    assert status_of(BEHIND_A_CLOSED_ONE, path, shm_dir) == -signal.SIGTERM
