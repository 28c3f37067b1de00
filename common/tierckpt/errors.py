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


LEFT_OUT = "was left out"
"""So a member puts it that has gone on to a newer version. It is nobody's failure; and as who gives
up passes on the first one's words, they tell it from failures wherever they come to."""


class PeerError(TierckptError):
    """A peer is gone, hangs, or gave up: the text names it and says why.

    `member` is its number in the group, where that is known.
    """

    def __init__(self, text: str, member: int | None = None) -> None:
        super().__init__(text)
        self.member = member


class RefusedError(PeerError):
    """A peer does not speak with us: another secret or another protocol. Retrying is of no use."""


class ExchangeCancelledError(PeerError):
    """This side gave the exchange up: superseded by a newer version, or the agent is closing."""


class PersistentError(TierckptError, OSError):
    """An operation on the store failed; nothing committed is lost.

    `url` is what was touched. `transient` is True when the cause may pass and every try was used
    up: the next version may be tried as usual. When it is False, trying again is of no use before
    somebody acts, and the text says what to do.
    """

    def __init__(self, text: str, url: str, transient: bool) -> None:
        super().__init__(text)
        self.url = url
        self.transient = transient

    def __reduce__(self) -> tuple[type[PersistentError], tuple[str, str, bool]]:
        return type(self), (str(self), self.url, self.transient)


class FlushCancelledError(TierckptError):
    """A flush was given up between two windows: superseded, or somebody retired the version.

    What is durable already is found again if the same version is flushed once more.
    """


class LeaseHeldError(TierckptError):
    """Another job holds the place; `owner` says who. `expires_seconds`: when it will have been
    watched for long enough (Unix time), if it is not renewed."""

    def __init__(self, url: str, owner: str, expires_seconds: float, left_seconds: float) -> None:
        self.owner, self.expires_seconds = owner, expires_seconds
        self._given = (url, owner, expires_seconds, left_seconds)
        super().__init__(
            f"{url} is in use by {owner}, whose lease ends in {left_seconds:.0f} s unless it is "
            "renewed. Two jobs cannot write to one place: give this one another persistent path. "
            "If the other one is dead, wait for that time; nothing need be removed. If it hangs "
            f"and cannot be ended: tierckpt takeover {url}"
        )

    def __reduce__(self) -> tuple[type[LeaseHeldError], tuple[str, str, float, float]]:
        return type(self), self._given
