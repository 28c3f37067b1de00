"""Exceptions that the package raises on purpose. All derive from `TierckptError`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class TierckptError(Exception):
    """Base class: catch it to catch everything that the package raises on purpose."""


class ConfigError(TierckptError, ValueError):
    """A setting is unknown, or its value is out of range; the text names the setting and its
    source."""


class UnsupportedStateError(TierckptError):
    """The training state contains something that cannot be checkpointed; raised when attaching."""


class NodeHealthError(TierckptError):
    """Nodes are not well; the text names each node and its problems.

    `problems` has a list of sentences for each node's name.
    """

    def __init__(self, problems: Mapping[str, Sequence[str]]) -> None:
        self.problems = {node: tuple(each) for node, each in problems.items()}
        texts = [f"node {node}: {each}" for node, many in self.problems.items() for each in many]
        super().__init__("\n".join(texts))

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickling between processes."""
        return type(self), (self.problems,)


class FormatError(TierckptError):
    """Bytes are not a shard or a manifest as expected, or have a newer major version."""


class NewerFormatError(FormatError):
    """The bytes have a newer major version; their content may be sound."""


class CorruptShardError(TierckptError):
    """A shard's bytes do not match the checksums of its manifest."""


class RestoreError(TierckptError):
    """A requested restore is not possible; nothing of the live state was changed.

    `reason` is the message without the advice to the user, for callers that handle the error.
    """

    def __init__(self, reason: str, way_out: str = "") -> None:
        self.reason = reason
        end = "\n" if "\n" in reason else ". "
        super().__init__(f"{reason}{end}{way_out}" if way_out else reason)


class StateTornError(TierckptError):
    """A restore changed a part of the live state and failed. Raised on all ranks. Do not train on
    this state; restore again, or end."""


class PinError(TierckptError):
    """A version cannot be pinned or unpinned: it does not exist, or a level cannot be reached."""


class ReplicaError(TierckptError):
    """Replicas differ, and `replicas` says "stop". Raised on all ranks at the same boundary.

    `names` has the first tensors that differ, and `ranks` those in the minority, if there is a
    majority.
    """

    def __init__(self, text: str, names: Sequence[str] = (), ranks: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.names, self.ranks = tuple(names), tuple(ranks)

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickling between processes."""
        return type(self), (str(self), self.names, self.ranks)


SAME_STATE = (
    "Build the same model and optimizer as the run that wrote it, or pass strict=False to load the "
    "parts that fit and leave the rest unchanged."
)


MAX_DIFFERENCES = 40
"""Limit of differences in one message."""


class StateMismatchError(RestoreError):
    """The checkpoint and the live state differ in structure; nothing was changed.

    `differences` lists every one of them, as text for a user.
    """

    def __init__(self, source: str, differences: Sequence[str], way_out: str = SAME_STATE) -> None:
        self._source, self.differences, self._way_out = source, tuple(differences), way_out
        shown = "\n".join(f"  - {d}" for d in self.differences[:MAX_DIFFERENCES])
        hidden = len(self.differences) - MAX_DIFFERENCES
        if hidden > 0:
            shown += f"\n  ... and {hidden} more"
        super().__init__(
            f"{source} does not fit the live training state "
            f"({len(self.differences)} difference(s)); nothing was changed:\n{shown}",
            way_out,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickling between processes."""
        return type(self), (self._source, self.differences, self._way_out)


LEFT_OUT = "was left out"
"""Part of the text of a member that left an exchange for a newer version, which is no failure;
members that give up repeat the first one's text, so the words identify the case everywhere."""


class PeerError(TierckptError):
    """A peer is gone, hangs, or gave up: the text names it and the reason.

    `member` is its number in the group, if known.
    """

    def __init__(self, text: str, member: int | None = None) -> None:
        super().__init__(text)
        self.member = member


class RefusedError(PeerError):
    """A peer refuses this one: it has another secret or another protocol. Retrying is useless."""


class ExchangeCancelledError(PeerError):
    """This side gave up the exchange: a newer version superseded it, or the agent is closing."""


class PersistentError(TierckptError, OSError):
    """An operation on the store failed; no committed version is lost.

    `url` is the object concerned. `transient` is True if the cause may pass and all retries failed:
    the next version may be tried as usual. If it is False, a retry is useless before the cause is
    removed, and the text says how.
    """

    def __init__(self, text: str, url: str, transient: bool) -> None:
        super().__init__(text)
        self.url = url
        self.transient = transient

    def __reduce__(self) -> tuple[type[PersistentError], tuple[str, str, bool]]:
        return type(self), (str(self), self.url, self.transient)


class FlushCancelledError(TierckptError):
    """A flush was given up between two windows: the agent shuts down for a later run's, or the
    version was retired.

    Parts that are durable are found again when the same version is flushed once more.
    """


class LeaseHeldError(TierckptError):
    """Another job holds the lease; `owner` names it. `expires_seconds` is the Unix time at which
    the lease has been watched for long enough, if it is not renewed."""

    def __init__(self, url: str, owner: str, expires_seconds: float, left_seconds: float) -> None:
        self.owner, self.expires_seconds = owner, expires_seconds
        self._given = (url, owner, expires_seconds, left_seconds)
        super().__init__(
            f"{url} is in use by {owner}, and its lease ends in {left_seconds:.0f} s unless it is "
            "renewed. Two jobs cannot write to one place: give this one another persistent path. "
            "If the other job is dead, wait for that time; nothing has to be removed. If it hangs "
            f"and you cannot end it: tierckpt takeover {url}"
        )

    def __reduce__(self) -> tuple[type[LeaseHeldError], tuple[str, str, float, float]]:
        return type(self), self._given
