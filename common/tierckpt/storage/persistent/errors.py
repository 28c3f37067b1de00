"""What the persistent level raises on purpose, besides FileNotFoundError for what is not there."""

from __future__ import annotations

from tierckpt.errors import TierckptError


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


class FlushCancelledError(TierckptError):
    """A flush was given up between two windows: superseded, or somebody retired the version.

    What is durable already is found again if the same version is flushed once more.
    """


class LeaseHeldError(TierckptError):
    """Another job holds the place; `owner` says who. `expires_seconds`: when it will have been
    watched for long enough (Unix time), if it is not renewed."""

    def __init__(self, url: str, owner: str, expires_seconds: float, left_seconds: float) -> None:
        self.owner, self.expires_seconds = owner, expires_seconds
        super().__init__(
            f"{url} is in use by {owner}, whose lease ends in {left_seconds:.0f} s unless it is "
            "renewed. Two jobs cannot write to one place: give this one another persistent path. "
            "If the other one is dead, wait for that time; nothing need be removed. If it hangs "
            f"and cannot be ended: tierckpt takeover {url}"
        )
