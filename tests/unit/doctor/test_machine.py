"""Limits of containers and processes, from a made-up /proc and /sys."""

from __future__ import annotations

import resource
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from tierckpt.config import Config
from tierckpt.doctor import Mark, Subject, machine


def cgroup(root: Path, limit_bytes: int, used_bytes: int) -> Path:
    """A container with a limit, as control groups of version 2 show it."""
    files = {
        "proc/meminfo": f"MemTotal: 999 kB\nMemAvailable: {2**36 // 1024} kB\n",
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": str(limit_bytes),
        "sys/fs/cgroup/memory.current": str(used_bytes),
        "sys/fs/cgroup/memory.stat": "anon 1\ninactive_file 0\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_limit_of_the_control_group_counts(tmp_path: Path) -> None:
    root = cgroup(tmp_path, 8 * 2**30, 2**30)
    (found,) = machine.memory(Subject(root=root))
    assert found.mark is Mark.GOOD
    assert found.text.startswith("7 GiB available, by the limit of /")
    (found,) = machine.memory(Subject(root=root, state_bytes=2**32))
    assert found.mark is Mark.CROSS
    assert found.text.endswith("the slots need 8 GiB")
    assert "docker run --memory" in found.cure
    (found,) = machine.memory(Subject(root=root, state_bytes=2**32, nodes=4))
    assert found.mark is Mark.GOOD


@pytest.mark.parametrize(
    ("made", "environment", "kind", "cure"),
    [
        (".dockerenv", {}, "Docker", "--shm-size=9g"),
        ("run/.containerenv", {}, "Podman", "--shm-size=9g"),
        ("x", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "Kubernetes", "sizeLimit: 9Gi"),
        ("x", {"APPTAINER_CONTAINER": "/x.sif"}, "Apptainer", "--bind /dev/shm"),
        ("x", {}, "", "remount,size=9g"),
    ],
)
def test_the_cure_fits_the_container(
    made: str, environment: dict[str, str], kind: str, cure: str, tmp_path: Path
) -> None:
    (tmp_path / made).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / made).touch()
    subject = Subject(Config(), environment, root=tmp_path)
    assert machine.container_of(subject) == kind
    assert cure in machine._larger(subject, 8 * 2**30)
    unknown = machine._larger(subject, 0)
    assert unknown.endswith("; N GiB: slots x state / nodes") == ("9" in cure)
    assert cure.replace("9", "N") in unknown


def test_a_state_that_does_not_fit_is_a_cross(shm_dir: Path) -> None:
    config = Config(shm_dir=str(shm_dir))
    (found,) = machine.shared_memory(Subject(config))
    assert found.mark is Mark.GOOD
    assert "for a state up to" in found.text
    (found,) = machine.shared_memory(Subject(config, state_bytes=2**50))
    assert found.mark is Mark.CROSS
    assert found.text.endswith("slots of the state need 2 PiB")
    (found,) = machine.shared_memory(Subject(config, state_bytes=2**50, nodes=2**30))
    assert found.mark is Mark.GOOD


def test_a_missing_shm_dir_is_a_cross(tmp_path: Path) -> None:
    (found,) = machine.shared_memory(Subject(Config(shm_dir=str(tmp_path / "gone"))))
    assert found.mark is Mark.CROSS
    assert "there is no directory" in found.text


def test_a_shm_dir_on_a_disk_is_a_cross(tmp_path: Path) -> None:
    kind = machine.mount_of(tmp_path).kind
    if kind in machine.MEMORY_KINDS:
        pytest.skip("the test's folder is in memory")
    (found,) = machine.shared_memory(Subject(Config(shm_dir=str(tmp_path))))
    assert found.mark is Mark.CROSS
    assert found.text.startswith(f"{tmp_path} is {kind}, not memory")


def test_few_open_files_are_a_warning_and_the_cure_works() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        (found,) = machine.limits(Subject())
        assert found.mark is Mark.WARNING
        command = f"{found.cure} && ulimit -n"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        assert done.stdout == f"{machine.OPEN_FILES}\n"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_infiniband_needs_locked_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    limits = {resource.RLIMIT_NOFILE: (4096, 4096), resource.RLIMIT_MEMLOCK: (65536, 65536)}
    monkeypatch.setattr(machine.resource, "getrlimit", limits.__getitem__)
    (found,) = machine.limits(Subject(root=tmp_path))
    assert found.mark is Mark.WARNING
    assert "memlock unlimited" in found.cure


def test_active_infiniband_without_an_address_is_a_warning(tmp_path: Path) -> None:
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    for name, text in (("state", "4: ACTIVE"), ("link_layer", "InfiniBand")):
        (port / name).write_text(text)
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (port.parents[1] / "device/net/ib0").mkdir(parents=True)
    (found,) = machine.infiniband(Subject(root=tmp_path))
    assert found.mark is Mark.WARNING
    assert found.text == "mlx5_0 is active (400 Gb/sec (4X NDR)), without an IP address"
    (port / "state").write_text("1: DOWN")
    assert [*machine.infiniband(Subject(root=tmp_path))] == []


def test_without_a_temporary_directory_there_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container with a read-only root."""
    assert [*machine.temporary(Subject())] == []
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "gone")])
    (found,) = machine.temporary(Subject(environment={"KUBERNETES_SERVICE_HOST": "10.0.0.1"}))
    assert found.mark is Mark.WARNING
    assert found.cure == "mount an emptyDir at /tmp"
    (found,) = machine.temporary(Subject(environment={}, root=tmp_path))
    assert found.cure.endswith("set TMPDIR")
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path)])
    assert [*machine.temporary(Subject())] == []


# --- the clock -----------------------------------------------------------------------------------


def test_the_kernel_says_whether_its_clock_is_synchronized() -> None:
    try:
        follows, error_seconds = machine.kernel_clock()
    except OSError:
        pytest.skip("the kernel does not say it here")
    assert isinstance(follows, bool)
    assert error_seconds >= 0


@pytest.mark.parametrize(
    ("kernel", "tracking", "mark", "text"),
    [
        ((True, 0.002), "", Mark.GOOD, "within 2 ms"),
        ((False, 16.0), "", Mark.WARNING, "follows no time server"),
        (
            (False, 16.0),
            "System time     : 0.000012 seconds fast of NTP time\nLeap status     : Normal\n",
            Mark.GOOD,
            "by chrony: 0.000012 seconds",
        ),
        ((False, 16.0), "Leap status     : Not synchronised\n", Mark.WARNING, "no time server"),
        (OSError(1, "Operation not permitted"), "", Mark.ABSENT, "does not say"),
    ],
)
def test_a_clock_without_a_server_is_a_warning(
    kernel: tuple[bool, float] | OSError,
    tracking: str,
    mark: Mark,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def of_kernel() -> tuple[bool, float]:
        if isinstance(kernel, OSError):
            raise kernel
        return kernel

    monkeypatch.setattr(machine, "kernel_clock", of_kernel)
    monkeypatch.setattr(machine.shutil, "which", lambda name: "there" if tracking else None)
    answer = SimpleNamespace(stdout=tracking)
    monkeypatch.setattr(machine.subprocess, "run", lambda *a, **k: answer)
    (found,) = machine.synchronized(Subject())
    assert found.mark is mark
    assert text in found.text
