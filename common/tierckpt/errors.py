"""Every exception that the package raises on purpose. All derive from `TierckptError`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class TierckptError(Exception):
    """Base class: catch this to catch everything the package raises on purpose."""


class ConfigError(TierckptError, ValueError):
    """A setting is unknown, or its value is out of range; the text names it and its source."""


class UnsupportedStateError(TierckptError):
    """The training state holds something that cannot be taken; raised when attaching."""


class NodeHealthError(TierckptError):
    """Nodes are not well; the text names each, and what is wrong with it.

    `problems` has a list of sentences for each node's name.
    """

    def __init__(self, problems: Mapping[str, Sequence[str]]) -> None:
        self.problems = {node: tuple(each) for node, each in problems.items()}
        told = [f"node {node}: {each}" for node, many in self.problems.items() for each in many]
        super().__init__("\n".join(told))

    def __reduce__(self) -> tuple[Any, ...]:
        """For processes that hand it on."""
        return type(self), (self.problems,)


class FormatError(TierckptError):
    """Bytes that should be a shard or a manifest are not, or are of a newer major version."""


class NewerFormatError(FormatError):
    """They are of a newer major version; what they hold may well be sound."""


class CorruptShardError(TierckptError):
    """A shard's bytes do not match the checksums of its manifest."""


class RestoreError(TierckptError):
    """A restore was asked for and cannot be done; nothing of the live state was changed.

    `reason` is the message without what its user may do about it, for those who go on all the same.
    """

    def __init__(self, reason: str, way_out: str = "") -> None:
        self.reason = reason
        end = "\n" if "\n" in reason else ". "
        super().__init__(f"{reason}{end}{way_out}" if way_out else reason)


class StateTornError(TierckptError):
    """A restore had begun to change the live state and could not end it: some of that is new, some
    is old. Raised on all ranks. Do not train on it; restore again, or end."""


class PinError(TierckptError):
    """A version cannot be pinned, or unpinned: it is nowhere, or a level cannot be asked."""


class ReplicaError(TierckptError):
    """Replicas differ, and `on_drift` is "stop". Raised on all ranks at the same boundary.

    `names` has the first tensors that differ, and `ranks` those that are odd, if a majority tells.
    """

    def __init__(self, what: str, names: Sequence[str] = (), ranks: Sequence[int] = ()) -> None:
        super().__init__(what)
        self.names, self.ranks = tuple(names), tuple(ranks)

    def __reduce__(self) -> tuple[Any, ...]:
        """For processes that hand it on."""
        return type(self), (str(self), self.names, self.ranks)


class StateMismatchError(RestoreError):
    """The checkpoint and the live state differ in structure; nothing was changed.

    `differences` lists every one of them, in a form that can be shown to a user.
    """

    def __init__(self, what: str, differences: Sequence[str]) -> None:
        self._what, self.differences = what, tuple(differences)
        shown = "\n".join(f"  - {d}" for d in self.differences[:40])
        hidden = len(self.differences) - 40
        if hidden > 0:
            shown += f"\n  ... and {hidden} more"
        super().__init__(
            f"{what} does not fit the live training state "
            f"({len(self.differences)} difference(s)); nothing was changed:\n{shown}",
            "Build the same model and optimizer as the run that wrote it, or pass strict=False to "
            "load what fits and leave the rest as it is.",
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """For processes that hand it on."""
        return type(self), (self._what, self.differences)
