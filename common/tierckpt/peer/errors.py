"""What goes wrong with a peer. None of it touches training: a version stays unprotected, is all."""

from __future__ import annotations

from tierckpt.errors import TierckptError

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
