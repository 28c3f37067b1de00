"""Agents and health checks start, however the process that starts them was started itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import xxhash

import tierckpt
from tierckpt.storage import JobDirectory

PACKAGES = [str(Path(module.__file__ or "").parents[1]) for module in (tierckpt, xxhash)]
LIKE_THE_LIBRARY = ("json", "os", "pathlib", "runpy", "site", "socket", "typing")
STARTER = """
import json, os, sys, time
root, told, *path = sys.argv[1:]
sys.path += path
from tierckpt.agent.client import AgentClient, AgentSettings
from tierckpt.agent.protocol import SessionSettings
from tierckpt.storage.health import Need, examine
client = AgentClient(AgentSettings(root, "job"), SessionSettings(root, 0, 2, "2"))
client.start()
while client.pid is None and not (problems := client.poll()):
    time.sleep(0.005)
if client.pid:
    problems = []
    streams = [os.readlink(f"/proc/{client.pid}/fd/{fd}") for fd in range(3)]
    if sys.stdout is None and streams != ["/dev/null"] * 3:
        problems.append(f"it takes these for its streams: {streams}")
starts = client.starts
client.close()
with open(told, "w") as file:
    json.dump([starts, problems, examine([Need(os.path.dirname(told))])], file)
"""
CLOSED = 'exec "$@" <&- >&- 2>&-'


@pytest.mark.parametrize(
    "how",
    [
        "-I -S, in the folder",
        "-E, PYTHONPATH names the folder",
        "PYTHONHOME, PYTHONWARNINGS=error, PYTHONINSPECT, PYTHONSTARTUP",
        "with all streams closed",
    ],
)
def test_they_start_beside_a_folder_of_modules_named_as_the_librarys(
    how: str, tmp_path: Path, shm_dir: Path
) -> None:
    """The folder is on the module path of the process that starts them."""
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in LIKE_THE_LIBRARY:
        (folder / f"{name}.py").write_text("raise ImportError('not the library')")
    flags = [word for word in how.replace(",", "").split() if word.startswith("-")]
    environment = {n: v for n, v in os.environ.items() if n != "PYTHONPATH"}
    if "PYTHONPATH" in how:
        environment["PYTHONPATH"] = str(folder)
    if "PYTHONHOME" in how:
        environment["PYTHONHOME"] = sys.base_prefix
    if "PYTHONWARNINGS" in how:
        environment["PYTHONWARNINGS"] = "error"
    if "PYTHONINSPECT" in how:
        environment |= {"PYTHONINSPECT": "1", "PYTHONSTARTUP": str(folder / "json.py")}
    root = shm_dir / "root"
    JobDirectory(root, "job").create()
    told = tmp_path / "told.json"
    program = [sys.executable, *flags, "-c", STARTER, str(root), str(told)]
    command = ["sh", "-c", CLOSED if "closed" in how else 'exec "$@"', "sh", *program]
    subprocess.run(
        [*command, *PACKAGES, str(folder)],
        cwd=folder if "in the folder" in how else tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        check=True,
    )
    starts, found, unwell = json.loads(told.read_text())
    assert (starts, found, unwell) == (1, [], [])
