"""Two jobs at one path on two machines exclude each other, and a dead job's claim is free."""

from __future__ import annotations

import ast
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import end, python
from tierckpt._process import host_id
from tierckpt.coordination import agree_on_settings
from tierckpt.group import SingleGroup
from tierckpt.storage import (
    CLAIM_PREFIX,
    Claim,
    DirectoryClaim,
    JobBusyError,
    JobFinishedError,
    Launch,
    claims,
    claims_in,
    file_lock,
    holder,
    launch_of,
    locks_are_local,
    mount_of,
    smallest,
)
from tierckpt.testing import TinyJob

TOKEN, OTHERS = "00aa", "11bb"
HOLD = (
    "import json, sys; from tierckpt.storage.claims import DirectoryClaim; "
    "from tierckpt.storage.claims import Launch\n"
    "launch = Launch(**json.loads(sys.argv[4]))\n"
    "made = DirectoryClaim(*sys.argv[1:3], int(sys.argv[3]), print, launch, '', "
    "json.loads(sys.argv[5]))\n"
    "assert made.stake() == ''; print('staked', flush=True); sys.stdin.read()"
)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "HERE_SECONDS", 0.3)
    monkeypatch.setattr(claims, "ELSEWHERE_SECONDS", 0.3)


@pytest.fixture
def notices() -> list[str]:
    return []


@pytest.fixture
def mine(tmp_path: Path, notices: list[str]) -> Iterator[Any]:
    """`mine(node=0, **launch)`: a claim of this process."""
    made = []

    def claim(
        node: int = 0, token: str = TOKEN, run_starters: Any = (), **launch: Any
    ) -> DirectoryClaim:
        tell = lambda text, _: notices.append(text)  # noqa: E731
        made.append(DirectoryClaim(tmp_path, token, node, tell, Launch(**launch), "", run_starters))
        return made[-1]

    yield claim
    for each in made:
        each.release()


@pytest.fixture
def living(tmp_path: Path) -> Iterator[Any]:
    """`living(**launch)`: another job, in a process of its own, that has claimed the path."""
    made = []

    def start(node: int = 0, run_starters: Any = (), **launch: Any) -> subprocess.Popen[str]:
        told = (json.dumps(launch), json.dumps(run_starters))
        process = python(HOLD, tmp_path, OTHERS, node, *told)
        made.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "staked\n"
        return process

    yield start
    for process in made:
        process.kill()
        end(process)


def killed(process: subprocess.Popen[str], directory: Path, node: str = "*") -> None:
    """Kill it, and wait until its claim is gone: the process that held it open for it ends a moment
    later."""
    process.kill()
    process.wait()
    marks = f".claim.{OTHERS}.{node}"
    while any(holder(mark) is not None for mark in directory.glob(marks)):
        time.sleep(0.01)


def marks(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir() if p.name.startswith(CLAIM_PREFIX))


def test_nodes_of_one_job_share_a_place_and_leave_nothing(tmp_path: Path, mine: Any) -> None:
    zero, one = mine(0), mine(1)
    assert (zero.stake(), one.stake()) == ("", "")
    assert marks(tmp_path) == [f".claim.{TOKEN}.0", f".claim.{TOKEN}.1"]
    zero.release()
    one.release()
    assert marks(tmp_path) == []


def test_a_running_job_is_named_and_left_alone(
    tmp_path: Path, mine: Any, living: Any, notices: list[str]
) -> None:
    other = living()
    why = mine().stake()
    assert f"another job uses {tmp_path} (process {other.pid} on " in why
    assert "give this job another path" in why
    assert f"remove {tmp_path}/.claim.{OTHERS}.0" in why
    assert marks(tmp_path) == [f".claim.{OTHERS}.0"]
    (text,) = notices
    assert f"is in use by process {other.pid}" in text
    (tmp_path / f".claim.{OTHERS}.0").unlink()
    assert mine().stake() == "", "the way out that was named"


def test_a_dead_jobs_claim_is_taken_over(
    tmp_path: Path, mine: Any, living: Any, notices: list[str]
) -> None:
    other = living()
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert marks(tmp_path) == [f".claim.{OTHERS}.0"]
    assert mine().stake() == ""
    assert (marks(tmp_path), notices) == ([f".claim.{TOKEN}.0"], [])


READ = HOLD.replace(
    "print('staked'",
    "import os, shutil; shutil.copytree(sys.argv[1], sys.argv[1] + '.backup')\n"
    "if os.fork() == 0: os._exit(len(os.read(0, 1)))\nprint('staked'",
).replace("sys.stdin.read()", "os.read(0, 1)")


def test_a_job_that_copies_its_directory_keeps_its_claim_and_its_orphans_do_not(
    tmp_path: Path, mine: Any
) -> None:
    """Closing a file drops all POSIX locks that the process has on it; and workers may outlive
    their trainer."""
    other = python(READ, tmp_path, OTHERS, 0, "{}", "[]")
    assert other.stdout is not None
    assert other.stdout.readline() == "staked\n"
    try:
        assert f"process {other.pid} on " in mine().stake()
        killed(other, tmp_path)
        assert mine().stake() == "", "the child that is left has no claim"
    finally:
        end(other)


def test_where_a_look_takes_longer_than_anybody_is_waited_for_there_is_a_second_one(
    tmp_path: Path, mine: Any, living: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow file system: a claim of a dead job blocks no other."""
    other = living()
    look, monotonic, sleep = DirectoryClaim._others, time.monotonic, time.sleep
    late = [0.0]

    def slow(self: DirectoryClaim) -> Any:
        late[0] += 2 * claims.HERE_SECONDS
        return look(self)

    def kill(seconds: float) -> None:
        monkeypatch.setattr(time, "sleep", sleep)
        killed(other, tmp_path)

    monkeypatch.setattr(DirectoryClaim, "_others", slow)
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + late[0])
    monkeypatch.setattr(time, "sleep", kill)
    assert mine().stake() == ""


# --- the owner of a past -------------------------------------------------------------------------

SLURM = "cluster/1000/7"


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({"job": SLURM}, {"job": SLURM, "attempt": 1}),
        ({"starters": ["x"], "run_starters": ["agent", "x"]}, {"starters": ["agent"]}),
        (
            {"starters": ["x"], "run_starters": ["agent", "x"]},
            {"starters": ["new"], "run_starters": ["agent", "new"]},
        ),
    ],
    ids=["an earlier attempt", "an agent's", "told by another node"],
)
def test_a_run_that_hangs_does_not_keep_out_its_proven_successor(
    before: dict[str, Any], now: dict[str, Any], tmp_path: Path, mine: Any, living: Any
) -> None:
    living(1, **before)
    assert mine(**now).stake() == ""
    assert len(marks(tmp_path)) == 2, "it may wake up: its claim is its own to remove"


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({"name": "Slurm job 7", "job": SLURM}, {"name": "Slurm job 7", "job": SLURM}),
        ({"job": SLURM, "attempt": 1}, {"job": SLURM}),
        ({"job": SLURM}, {"job": SLURM.replace("cluster", "other"), "attempt": 1}),
        ({"name": "torchrun a", "starters": ["x"]}, {"name": "torchrun a", "starters": ["y"]}),
        ({"starters": ["agent"]}, {"starters": ["agent"]}),
    ],
    ids=["one allocation", "a later attempt", "another cluster", "one rdzv-id", "one agent, alive"],
)
def test_a_running_job_is_left_alone_whatever_its_launch_is_called(
    before: dict[str, Any], now: dict[str, Any], mine: Any, living: Any
) -> None:
    living(**before)
    assert "another job uses" in mine(**now).stake()


def test_an_agents_ranks_of_both_runs_must_be_gone_on_its_node(
    tmp_path: Path, mine: Any, living: Any
) -> None:
    run_starters = ["agent", "x"]
    first = living(0, run_starters, starters=["agent"])
    living(1, run_starters, starters=["x"])
    assert "another job uses" in mine(starters=["agent"]).stake()
    killed(first, tmp_path, "0")
    assert mine(starters=["agent"]).stake() == ""


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({}, ("", "", 0)),
        ({"TORCHELASTIC_RUN_ID": "none"}, ("", "", 0)),
        ({"TORCHELASTIC_RUN_ID": "a"}, ("torchrun a", "", 0)),
        ({"SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "a"}, ("Slurm job 7", "", 0)),
        (
            {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_CLUSTER_NAME": "c"},
            ("Slurm step 7.0", "c//7", 0),
        ),
        (
            {"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "c", "SLURM_RESTART_COUNT": "2"},
            ("Slurm job 7", "c//7", 2),
        ),
        ({"HOROVOD_GLOO_RENDEZVOUS_ADDR": "h"}, ("", "", 0)),
        (
            {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "h", "HOROVOD_GLOO_RENDEZVOUS_PORT": "1"},
            ("Horovod h:1", "", 0),
        ),
    ],
)
def test_a_run_is_identified_by_its_launchers_environment(
    environment: dict[str, str], told: tuple[str, str, int]
) -> None:
    launch = launch_of(environment)
    assert (launch.name, launch.job, launch.attempt) == told


def test_the_agent_is_found_whatever_script_is_around_a_rank() -> None:
    """A rank of torchrun; this process plays its agent."""
    tell = "import os; from tierckpt.storage.claims import launch_of; "
    tell += "print(launch_of(os.environ).starters)"
    names = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_ERROR_FILE": "/f", "RANK": "0"}
    told = []
    for command in (
        [sys.executable, "-c", tell],
        ["sh", "-c", f'"{sys.executable}" -c "$1"; true'],
    ):
        around = [] if command[0] == sys.executable else ["sh", tell]
        environment = {**os.environ, **names, "MASTER_PORT": "1"}
        said = subprocess.check_output([*command, *around], env=environment, text=True)
        told.append(ast.literal_eval(said))
    (one, agent), (other, again) = told
    assert agent == again == claims.process_mark("self") == claims.process_mark(os.getpid())
    assert len({one, other, agent}) == 3
    assert launch_of({}).starters == (claims.process_mark("self"),)
    assert launch_of({}, in_use=True).starters == (), "it is in another run yet"


def test_the_agent_is_found_behind_a_shim_that_changed_the_port() -> None:
    """`tierckpt run`; a shell plays it, and this process the agent."""
    tell = "import os; from tierckpt.storage.claims import launch_of; "
    tell += "print(launch_of(os.environ).starters)"
    names = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_ERROR_FILE": "/f", "RANK": "0"}
    attempt = f'MASTER_PORT=2 TIERCKPT_ATTEMPT=2 "{sys.executable}" -c "$1"; true'
    environment = {**os.environ, **names, "MASTER_PORT": "1"}
    command = ["sh", "-c", attempt, "sh", tell]
    said = subprocess.check_output(command, env=environment, text=True)
    assert ast.literal_eval(said)[1] == claims.process_mark("self")


def test_where_proc_is_of_another_namespace_no_agent_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The parent's number is that of any process there."""
    names = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "MASTER_PORT": "1"}
    assert len(launch_of(names).starters) == 2
    monkeypatch.setattr(os, "getpid", lambda: 7)
    assert len(launch_of(names).starters) == 1


def test_two_runs_with_many_starters_share_some_of_their_ids() -> None:
    one = [f"{number:016x}" for number in range(3000)]
    assert smallest(one) == tuple(one[: claims.MAX_STARTERS])
    assert len(set(smallest(one[::2])) & set(smallest(one))) == claims.MAX_STARTERS // 2


def test_another_claim_of_this_process_is_seen_by_whatever_name(tmp_path: Path, mine: Any) -> None:
    """Its lock would be gone after the first read of the file."""
    assert mine(token=OTHERS, run_starters=["another rank's"]).stake() == ""
    (link := tmp_path.parent / f"{tmp_path.name}.link").symlink_to(tmp_path)
    by_link = DirectoryClaim(link, TOKEN, 0, lambda *_: None, Launch(starters=("another rank's",)))
    why = by_link.stake()
    by_link.release()
    assert f"process {os.getpid()} on " in why
    probe = "import sys; from tierckpt.storage.local import unlocked; from pathlib import Path\n"
    probe += "print(unlocked(Path(sys.argv[1])))"
    command = [sys.executable, "-c", probe, tmp_path / f".claim.{OTHERS}.0"]
    assert subprocess.check_output(command, text=True) == "False\n"


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.symlink_to(path)])
def test_a_claim_that_cannot_be_opened_counts_as_held(
    make: Callable[[Path], object], tmp_path: Path, mine: Any
) -> None:
    path = tmp_path / f".claim.{OTHERS}.0"
    make(path)
    why = mine().stake()
    assert "another job uses" in why
    assert f"remove {path}" in why
    path.rmdir() if path.is_dir() else path.unlink()
    assert mine().stake() == ""


def test_unknown_fields_of_a_later_tierckpt_are_ignored(tmp_path: Path) -> None:
    claim = Claim("host", 7, 0.0, launch="torchrun a", starters=("x",))
    content = json.dumps({**json.loads(claim.encode()), "more": [1]}).encode()
    assert Claim.decode(content) == claim
    before = {"host": "h", "pid": 7, "since_seconds": 0.0, "machine": "m", "launch": "Slurm job 7"}
    assert Claim.decode(json.dumps(before).encode()).starters == ()


def test_a_claim_that_says_nothing_of_its_holder_counts(tmp_path: Path, mine: Any) -> None:
    path = tmp_path / f".claim.{OTHERS}.0.new"
    holder = python(
        "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX)\n"
        "print('locked', flush=True); sys.stdin.read()",
        path,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "locked\n"
    assert "another job uses" in mine().stake()
    killed(holder, tmp_path)
    end(holder)
    assert mine().stake() == ""
    assert marks(tmp_path) == [f".claim.{TOKEN}.0"]


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_locks_the_job_continues_and_it_is_reported(
    code: int,
    tmp_path: Path,
    mine: Any,
    living: Any,
    notices: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    living()

    def none_here(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "lockf", none_here)
    assert mine().stake() == ""
    (text,) = notices
    assert "a job on another machine with the same path would not be noticed" in text
    assert marks(tmp_path) == [f".claim.{OTHERS}.0"], "and touches nobody's"


def test_where_locks_are_a_machines_own_nobodys_claim_is_taken_for_a_dead_ones(
    tmp_path: Path, mine: Any, notices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS with `nolock`: a claim that no process here holds may be held on another machine."""
    monkeypatch.setattr(claims, "locks_are_local", lambda directory: "/shared is mounted (nfs)")
    theirs, ours = tmp_path / ".claim.22cc.0", tmp_path / ".claim.33dd.0"
    theirs.write_bytes(Claim("other", 7, 0.0, "another machine").encode())
    ours.write_bytes(Claim("this", 7, 0.0, host_id()).encode())
    assert mine().stake() == ""
    (text,) = notices
    assert text.startswith("/shared is mounted (nfs): a job on another machine")
    assert "process 7 on other" in text
    assert theirs.exists()
    assert not ours.exists()


MOUNTS = r"""22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
30 22 0:40 / /home\040of rw,relatime - nfs4 server:/home rw,vers=4.2,local_lock=none
31 22 0:41 / /old rw - nfs server:/old rw,vers=3,nolock,local_lock=all
32 22 0:42 / /lustre rw shared:1 - lustre mgs:/fs rw,flock
33 32 0:43 / /lustre/own rw - lustre mgs:/own rw,localflock
34 22 0:44 / /far rw - fuse.sshfs me@far: rw
"""


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/x", ""),
        ("/home of/x", ""),
        ("/older", ""),
        ("/old", "/old is mounted (nfs) with local_lock=all"),
        ("/lustre/x", ""),
        ("/lustre/own/x", "/lustre/own is mounted (lustre) with localflock"),
        ("/far/x", "/far is fuse.sshfs, which has no locks between machines"),
    ],
)
def test_mounts_show_which_hosts_locks_are_seen(path: str, why: str) -> None:
    assert mount_of(path, MOUNTS.splitlines()).keeps_locks == why
    assert locks_are_local("/proc") == ""


def test_a_job_taken_for_dead_before_it_had_its_lock_tries_again(
    tmp_path: Path, mine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process looks between the creation of the file and its lock."""
    removed = []
    lock = file_lock.lock_for_good

    def late(fd: int, path: Path) -> bool:
        if not removed:
            removed.append(tmp_path / f".claim.{TOKEN}.0.new")
            removed[0].unlink()
        return lock(fd, path)

    monkeypatch.setattr(file_lock, "lock_for_good", late)
    assert mine().stake() == ""
    assert removed
    assert marks(tmp_path) == [f".claim.{TOKEN}.0"]


# --- in a job ------------------------------------------------------------------------------------

JOB = (
    "import sys; from tierckpt.testing import TinyJob\n"
    "with TinyJob(sys.argv[1], shm_dir=sys.argv[2], node='other', agent='inline') as job:\n"
    "    job.run(2); print('running', flush=True); sys.stdin.read()"
)


def test_a_second_job_is_refused_until_the_first_one_has_ended(
    tmp_path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another machine: its memory has nothing of this one's. The launchers use the same name."""
    for name in ("SLURM_JOB_ID", "SLURM_CLUSTER_NAME", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "7")
    for name in ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"):
        monkeypatch.setenv(name, "7")
    path, memory = tmp_path / "ckpts", shm_dir / "another machine's"
    memory.mkdir()
    settings = {"shm_dir": str(shm_dir), "agent": "inline"}
    first = python(JOB, path, memory)
    assert first.stdout is not None
    assert first.stdout.readline() == "running\n"
    with pytest.raises(JobBusyError, match=f"another job uses {path}.*{first.pid}"):
        TinyJob(path, **settings)
    first.kill()
    end(first)
    with TinyJob(path, **settings) as job:
        assert job.restore() == 2
        assert len(marks(path)) == 1
        job.run(3)
    assert marks(path) == []


def test_a_launcher_of_a_refused_job_does_not_start_it_again(
    tmp_path: Path, mine: Any, living: Any
) -> None:
    """It would find the path free, and continue from the end of another training."""
    launcher = {"starters": ("this start", "torchrun")}
    refused = mine(token="22cc", **launcher)
    refused.leave_refused(60)
    for token in ("33dd", "44ee"):
        with pytest.raises(JobFinishedError, match="finished at v60"):
            mine(token=token, starters=("another start", "torchrun")).stake()
    assert mine(token="55ff", starters=("another torchrun",)).stake() == ""
    assert marks(tmp_path) == [".claim.55ff.0"]


def test_of_a_process_that_has_a_rank_of_the_job_yet_nothing_is_proved(
    tmp_path: Path, shm_dir: Path
) -> None:
    settings = {"path": str(tmp_path / "ckpts"), "shm_dir": str(shm_dir)}
    mark = claims.process_mark("self")

    def starters() -> tuple[str, ...]:
        return agree_on_settings(settings, None, SingleGroup())[1].starters

    assert mark in starters()
    with TinyJob(agent="inline", **settings):
        assert mark not in starters()
        assert mark in agree_on_settings({**settings, "path": "b"}, None, SingleGroup())[1].starters
    assert mark in starters()


def test_one_without_a_local_level_claims_nothing(tmp_path: Path, shm_dir: Path) -> None:
    path = tmp_path / "ckpts"
    nothing = {"local_every_steps": 0, "local_every_seconds": 0.0}
    with TinyJob(path, shm_dir=str(shm_dir), **nothing) as job:
        job.run(2)
    assert not path.exists()


def test_a_directory_that_does_not_exist_has_no_claims(tmp_path: Path) -> None:
    assert claims_in(tmp_path / "missing") == []
