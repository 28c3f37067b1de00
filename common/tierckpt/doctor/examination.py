"""Examination: runs all checks at once, each in a thread of its own and with a time limit."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tierckpt._text import in_words

from . import clock, machine, network, parallel, places, settings, software
from .finding import Check, Finding, Mark, Subject, cross

LIMIT_SECONDS = 300.0
"""Time for all checks: importing torch takes a minute on a busy machine or a slow file system."""

SECTIONS: dict[str, tuple[Check, ...]] = {
    "Software": (
        software.python,
        software.torch,
        parallel.horovod,
        parallel.mpi,
        software.frameworks,
        software.extras,
    ),
    "Machine": (
        machine.shared_memory,
        machine.memory,
        machine.temporary,
        machine.limits,
        clock.synchronized,
    ),
    "Places": (places.local, places.persistent),
    "Network": (network.interface, network.infiniband),
    "Settings": (
        settings.variables,
        settings.configuration,
        settings.iterations,
        settings.notices,
        settings.agents,
    ),
}


@dataclass(frozen=True)
class Section:
    """The findings of some checks."""

    title: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Report:
    """All findings on one node."""

    node: str
    sections: tuple[Section, ...]

    @property
    def findings(self) -> list[Finding]:
        """Findings of all sections."""
        return [finding for section in self.sections for finding in section.findings]

    def count(self, mark: Mark) -> int:
        """Number of findings with this mark."""
        return sum(finding.mark is mark for finding in self.findings)


class _Run:
    """One check in a thread."""

    def __init__(self, check: Check, subject: Subject) -> None:
        self._check, self._subject = check, subject
        self._findings: list[Finding] | None = None
        # A daemon: a thread on a dead file system cannot be ended, and must not keep the process.
        self._thread = threading.Thread(target=self._run, name=check.__name__, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._findings = [*self._check(self._subject)]
        except Exception as error:
            text = f"the check failed: {in_words(error)}"
            self._findings = [cross(self._name, text, "report this error; other checks are valid")]

    @property
    def _name(self) -> str:
        return self._check.__name__.replace("_", " ")

    def findings(self, timeout_seconds: float) -> list[Finding]:
        """The findings, or one that it did not end in time."""
        self._thread.join(max(timeout_seconds, 0))
        if self._findings is None:
            text = "the check did not end in time; something that it needs hangs"
            return [cross(self._name, text, "look at the kernel's messages: dmesg | tail")]
        return self._findings


def examine(
    subject: Subject,
    sections: dict[str, tuple[Check, ...]] = SECTIONS,
    timeout_seconds: float = LIMIT_SECONDS,
) -> Report:
    """Run all checks. Never raises for anything that a check does."""
    deadline = time.monotonic() + timeout_seconds
    runs = {title: [_Run(check, subject) for check in checks] for title, checks in sections.items()}
    found = [Section(title, _gathered(each, deadline)) for title, each in runs.items()]
    node = subject.config.node or socket.gethostname()
    return Report(node, tuple(section for section in found if section.findings))


def _gathered(runs: Sequence[_Run], deadline: float) -> tuple[Finding, ...]:
    return tuple(f for run in runs for f in run.findings(deadline - time.monotonic()))
