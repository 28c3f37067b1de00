"""Processes are stopped for a moment, and none stays stopped."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.slow_machine import SlowMachine
from tests.support.waiting import until
from tierckpt._process import process_stat


def test_a_process_is_stopped_and_awake_in_the_end() -> None:
    machine = SlowMachine(mean_seconds=600.0, most_seconds=600.0)
    environment = {**os.environ, **machine.environment}
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE) as process:
        until(lambda: process_stat(process.pid)[0] == "T")
        machine.end()
        assert process_stat(process.pid)[0] != "T"
        process.communicate(b"\n")
    assert process.returncode == 0
