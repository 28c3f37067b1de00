"""Notices of an integration: some are found before there is a checkpointer to give them to."""

from __future__ import annotations

from tierckpt.checkpointer.adapter import Handle
from tierckpt.checkpointer.checkpointer import Checkpointer


class Notices:
    """Takes texts with their severity, as `frameworks.Say`; keeps them until `attach`. Training
    thread."""

    def __init__(self) -> None:
        self._kept: list[tuple[str, int]] = []
        self._handle: Handle | None = None

    def __call__(self, text: str, severity: int) -> None:
        if self._handle is None:
            self._kept.append((text, severity))
        else:
            self._handle.notice(text, severity)

    def attach(self, checkpointer: Checkpointer) -> None:
        """Give all notices to this checkpointer from now on, those that were kept first."""
        self._handle = Handle(checkpointer)
        for text, severity in self._kept:
            self._handle.notice(text, severity)
        self._kept.clear()


__all__ = ["Notices"]
