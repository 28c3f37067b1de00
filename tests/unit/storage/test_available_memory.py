"""Available memory: of the machine, and under the limits of control groups."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierckpt.storage import Room, memory_room

MIB = 1 << 20


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MACHINE = {"proc/meminfo": "MemTotal:  9999999 kB\nMemAvailable:  2048 kB\nBuffers: 7 kB\n"}
GROUP = {"memory.max": f"{10 * MIB}\n", "memory.current": f"{9 * MIB}\n"}


def test_the_machine_where_there_is_no_group(tmp_path: Path) -> None:
    assert memory_room(tmp_path) is None, "nothing is known to be wrong"
    assert memory_room(system(tmp_path, MACHINE)) == Room(2 * MIB, "this node")


def test_the_tightest_group_counts_and_its_cache_does_not(tmp_path: Path) -> None:
    files = {**MACHINE, "proc/self/cgroup": "1:cpu:/else\n0::/slurm/step\n"}
    above = "sys/fs/cgroup/slurm"
    for name, text in GROUP.items():
        files[f"{above}/{name}"] = text
    files[f"{above}/step/memory.max"] = "max\n"
    files[f"{above}/step/memory.current"] = f"{7 * MIB}\n"
    root = system(tmp_path, files)
    assert memory_room(root) == Room(MIB, str(root / above))
    (root / above / "memory.stat").write_text(f"anon 5\ninactive_file {MIB // 2}\nfile 3\n")
    assert memory_room(root) == Room(MIB * 3 // 2, str(root / above))
    (root / above / "memory.current").write_text(f"{11 * MIB}\n")
    assert memory_room(root) == Room(0, str(root / above))


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    files = {**MACHINE, "proc/self/cgroup": "0::/system.slice/docker-1.scope\n"}
    files |= {f"sys/fs/cgroup/{name}": text for name, text in GROUP.items()}
    root = system(tmp_path, files)
    assert memory_room(root) == Room(MIB, str(root / "sys/fs/cgroup"))


def test_groups_of_the_first_generation(tmp_path: Path) -> None:
    files = {**MACHINE, "proc/self/cgroup": "9:name=systemd:/x\n4:hugetlb,memory:/job\n0::/\n"}
    folder = "sys/fs/cgroup/memory/job"
    files[f"{folder}/memory.limit_in_bytes"] = f"{4 * MIB}\n"
    files[f"{folder}/memory.usage_in_bytes"] = f"{4 * MIB - 4096}\n"
    files[f"{folder}/memory.stat"] = "inactive_file 1\ntotal_inactive_file 4096\n"
    root = system(tmp_path, files)
    assert memory_room(root) == Room(8192, str(root / folder))


@pytest.fixture
def group() -> Iterator[Path]:
    """A real control group, if this machine allows it."""
    for mount, limit in (("memory", "memory.limit_in_bytes"), ("", "memory.max")):
        folder = Path("/sys/fs/cgroup", mount, "tierckpt-test")
        try:
            folder.mkdir()
            (folder / limit).write_text(str(256 * MIB))
        except OSError:
            if folder.is_dir():
                folder.rmdir()
            continue
        yield folder
        folder.rmdir()
        return
    pytest.skip("no control group can be made here")


def test_a_process_in_a_real_group(group: Path) -> None:
    program = (
        "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid()))\n"
        "from tierckpt.storage.health import memory_room; room = memory_room()\n"
        "print(room.nbytes); print(room.where)"
    )
    command = [sys.executable, "-c", program, str(group / "cgroup.procs")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert said[1] == str(group)
    assert 128 * MIB < int(said[0]) <= 256 * MIB
