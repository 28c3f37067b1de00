"""Checks of one examination do not disturb each other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import NoReturn

from tierckpt.doctor import (
    Finding,
    Mark,
    Subject,
    examine,
    good,
    warning,
)


def well(subject: Subject) -> Iterator[Finding]:
    yield good("well", "works")
    yield warning("weak", "is slow", "make it faster")


def half_broken(subject: Subject) -> Iterator[Finding]:
    yield good("half", "works")
    raise ValueError("no such thing")


def broken_check(subject: Subject) -> NoReturn:
    raise OSError(5, "Input/output error")


def test_a_check_that_raises_is_a_cross_with_its_error() -> None:
    report = examine(Subject(), {"One": (broken_check, well), "Two": (half_broken,)})
    one, two = report.sections
    assert [f.mark for f in one.findings] == [Mark.CROSS, Mark.GOOD, Mark.WARNING]
    assert one.findings[0].name == "broken check"
    assert one.findings[0].text == "the check failed: OSError: [Errno 5] Input/output error"
    assert "ValueError: no such thing" in two.findings[0].text
    assert (report.count(Mark.CROSS), report.count(Mark.WARNING)) == (2, 1)


def test_a_check_that_hangs_is_a_cross_and_the_others_are_there() -> None:
    release = threading.Event()

    def hangs(subject: Subject) -> Iterator[Finding]:
        release.wait(60)
        yield good("hangs", "late")

    try:
        report = examine(Subject(), {"One": (hangs, well)}, timeout_seconds=0.5)
        assert [f.mark for f in report.findings] == [Mark.CROSS, Mark.GOOD, Mark.WARNING]
        assert "did not end in time" in report.findings[0].text
    finally:
        release.set()
        for thread in threading.enumerate():
            if thread.name == "hangs":
                thread.join(60)
