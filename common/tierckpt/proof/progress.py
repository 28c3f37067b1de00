"""Progress of a run: a bar on a terminal, else one line."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import rich.progress
    from rich.console import Console


class Bar:
    """The display of one run, used in a `with`."""

    def __init__(self, name: str, begin: int, until: int, console: Console) -> None:
        self._name, self._begin, self._until, self._console = name, begin, until, console
        self._since = time.monotonic()
        self._bar: rich.progress.Progress | None = None
        self._task: rich.progress.TaskID | None = None

    def __enter__(self) -> Bar:
        if self._console.is_terminal:
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description:12}"), BarColumn())
            steps = TextColumn("step {task.fields[at]} of {task.fields[until]}")
            self._bar = Progress(*columns, steps, TimeElapsedColumn(), console=self._console)
            total = self._until - self._begin
            at, until = self._begin, self._until
            self._task = self._bar.add_task(self._name, total=total, at=at, until=until)
            self._bar.start()
        return self

    def step(self, version: int) -> None:
        """Show that the run has reached this version."""
        if self._bar is not None and self._task is not None and version:
            at = min(version, self._until)  # the end takes one or two steps more
            self._bar.update(self._task, completed=at - self._begin, at=at)

    def __exit__(self, *error: object) -> None:
        seconds = time.monotonic() - self._since
        if self._bar is not None:
            self._bar.stop()
        elif error[0] is None:
            text = f"{self._name}: up to step {self._until}, {seconds:.0f} s"
            self._console.print(text, soft_wrap=True)


__all__ = ["Bar"]
