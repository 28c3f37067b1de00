"""What a restart may find, from the history alone: it knows nothing of plans, files or manifests.

A rank says which version it has reached, which version each level has (`Checkpointer.newest`), and
what a restart gave it. A version that a level was said to have must be found by every later
restart, until a failure takes away what that level is made of; then the next level's must be.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .world import Node

LEVELS = ("memory", "local", "peer", "persistent")


class WrongError(AssertionError):
    """The product broke a promise."""


@dataclass
class Oracle:
    """Follows one history."""

    reference: list[str]
    """The fingerprint of the state by version."""
    floor: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LEVELS, 0))
    """By level the version that it was said to have, and that nothing has taken from it since."""
    reached: dict[int, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    """By run and rank, the newest version of its state."""
    started: dict[int, int] = field(default_factory=dict)
    """The version from which each run started."""
    trails: dict[int, Any] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    wrong: str = ""
    run: int = 0
    """The newest run."""
    lost_disks: set[int] = field(default_factory=set)
    """Nodes with a lost disk since a version was complete on the level peer."""
    lost_in: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LEVELS, 0))
    """By level the run in which a part of it was lost: what its ranks still say is from before."""

    back_to: int | None = None
    """The version that the next start must have, since somebody has asked for it."""
    branch: tuple[int, int] | None = None
    """The run that was sent back, and its version: each later one continues from there."""
    pins: dict[tuple[Node, int], int] = field(default_factory=dict)
    """By node and version, the number of files that a pin must keep."""

    def tell(self, run: int, rank: int, kind: str, *what: Any) -> None:
        """A rank says something."""
        try:
            getattr(self, f"_{kind}")(run, rank, *what)
        except WrongError as error:
            self.wrong = self.wrong or str(error)

    def lose(self, level: str) -> None:
        """A failure has taken away a part of this level."""
        self.floor[level] = 0
        self.lost_in[level] = self.run

    def lose_disk(self, node: int) -> None:
        """A node's disk is lost. Other nodes replace one, if a version was complete on the level
        peer since the last loss."""
        self.lose("local")
        self.lost_disks.add(node)
        self.pins = {key: each for key, each in self.pins.items() if key[0].index != node}
        if len(self.lost_disks) > 1:
            self.lose("peer")

    def must_go_back(self, version: int) -> None:
        """The next start must have this older version."""
        self.said.append(f"*** sent back to v{version}")
        self.back_to = version
        self.floor = dict.fromkeys(LEVELS, 0)

    def pin(self, node: Node, version: int, done: bool) -> None:
        """A command that pins a version has ended."""
        if done:
            self.said.append(f"*** pinned v{version}")
            self.pins[node, version] = len(_files(node, version))

    def check_pins(self) -> None:
        """Nothing of a pinned version may be gone."""
        for (node, version), count in self.pins.items():
            if len(left := _files(node, version)) < count:
                self.wrong = f"v{version} was pinned with {count} files; now {left}"

    @property
    def nothing_left(self) -> bool:
        """Whether no level must have a version."""
        return not any(self.floor.values())

    def _event(self, run: int, rank: int, event: Any) -> None:
        about = f"{event.name} v{event.version} {event.level} {event.message} {event.reason}"
        self.said.append(f"{event.monotonic_seconds - 1e6:.4f} run {run} rank {rank}: {about}")

    def _reached(self, run: int, rank: int, version: int) -> None:
        if self.back_to is not None:  # all ranks are there, or no step would be made
            self.branch, self.back_to = (run, self.back_to), None
        self.reached[run][rank] = version

    def _newest(self, run: int, rank: int, newest: dict[str, int | None]) -> None:
        for level, version in newest.items():
            if version is not None and level in self.floor and run > self.lost_in[level]:
                if level == "peer" and version > self.floor[level]:
                    self.lost_disks.clear()
                self.floor[level] = max(self.floor[level], version)

    def _closed(self, run: int, rank: int, end: Any) -> None:
        if end is not None:
            self._newest(run, rank, end.newest)

    def _restored(self, run: int, rank: int, version: int, bits: str, trail: Any) -> None:
        self.said.append(f"run {run} rank {rank}: restored v{version} {trail}")
        if run in self.started and self.started[run] != version:
            raise WrongError(
                f"run {run}: rank {rank} restored v{version}, another rank v{self.started[run]}"
            )
        if bits != self.reference[version]:
            raise WrongError(f"run {run}: rank {rank} has other bits than those of v{version}")
        if self.trails.setdefault(run, trail) != trail:
            raise WrongError(
                f"run {run}: rank {rank} has v{version} of the runs {trail}, another rank that of "
                f"{self.trails[run]}"
            )
        if self.back_to not in (None, version):
            raise WrongError(f"run {run} restored v{version}, and was sent back to v{self.back_to}")
        if self.branch is not None and not any(
            later >= self.branch[0] and begin == self.branch[1] for later, begin in trail
        ):
            raise WrongError(f"run {run} has {trail}: not the branch of {self.branch}")
        self.started[run] = version
        self.reached[run][rank] = version
        must = max(self.floor.values())
        if version < must:
            level = max(self.floor, key=lambda each: self.floor[each])
            raise WrongError(
                f"run {run} restored v{version}, and {level} was said to have v{must}: {self.floor}"
            )
        for (earlier, start), (later, begin) in pairwise(trail):
            if (
                later == run
                and earlier != run
                and begin > max([*self.reached[earlier].values(), start], default=0)
            ):
                raise WrongError(f"run {run} restored v{begin}, which run {earlier} never reached")


def _files(node: Node, version: int) -> list[str]:
    return sorted(each.name for each in (node.disk / "ckpts").glob(f"v{version:010d}.*"))
