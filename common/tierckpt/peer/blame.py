"""Blame: the member that is the cause, when a member of an exchange waits for another in vain.

All members become silent together when one hangs. So a silent member is asked, before it is blamed,
which members it waits for itself. Only the members that wait for the hanging one give up by
themselves; their last message names it to the others.
"""

from __future__ import annotations

from tierckpt.errors import PeerError, RefusedError

from .party import Party
from .transport import Host, Transport
from .wire import Link

LAST_WORDS_SECONDS = 2.0
"""Limit for the last message of a member that gave up to arrive."""
SHOWN_NAMES = 8
NO_ANSWER = "it does not answer"


class Blame:
    """The questions of one member in one exchange. Any thread."""

    def __init__(self, transport: Transport, host: Host, party: Party) -> None:
        """`host`: this member's exchange."""
        self._transport, self._host, self._party = transport, host, party
        self._replies: dict[int, str] = {}
        """The last answers, in words, by member."""

    def excuse(self, member: int, silent_seconds: float) -> bool:
        """Ask a silent member before it is blamed; True if it gets `stall_seconds` more.

        It gets them if it waits for a third one. It may still be joining the one that hangs, which
        takes `join_seconds`: no silence is excused longer. A member that waits for no other is
        working, perhaps on a slow disk, and gets `stall_seconds` more, once.
        """
        limits = self._transport.limits
        if silent_seconds > limits.join_seconds + limits.stall_seconds:
            return False
        answer = self._ask(member)
        if answer is None:
            self._replies[member] = NO_ANSWER
            return False
        waits, gave_up = answer
        if gave_up:
            self._replies[member] = f"it gave up: {gave_up}"
            return False
        if not waits:
            self._replies[member] = "it answers and waits for no member, but makes no progress"
            return silent_seconds < 1.5 * limits.stall_seconds
        self._replies[member] = f"it waits for {', '.join(waits)}"
        return waits != [self._party.name(self._party.member)]

    def explain(self, error: PeerError, member: int, label: str, link: Link | None) -> PeerError:
        """The error of the exchange `label`, from an `error` that blames a member: with the reason
        that this member gave, in its last message on `link` or when it was asked."""
        text = f"{label} is not protected: {error}"
        if isinstance(error, RefusedError):  # carries the peer's reason already
            return type(error)(text, member)
        if link is not None and (words := _last_words(link)):
            text += f"; it gave up: {words}"
        elif member in self._replies:
            text += f"; {self._replies[member]}"
            if self._replies[member] != NO_ANSWER and (silent := self._silent(member)):
                text += f"; no answer from {', '.join(silent)}"
        return type(error)(text, member)

    def _silent(self, blamed: int) -> list[str]:
        """Names of the other members that do not answer.

        The blamed member answers, so it may be only slow, with its disk for example, and one of
        these be the cause.
        """
        others = (member for member in self._party.others if member != blamed)
        return [self._party.name(m) for m in others if self._ask(m) is None][:SHOWN_NAMES]

    def _ask(self, member: int) -> tuple[list[str], str] | None:
        """Which members it waits for, and why it gave up; None when it does not answer."""
        transport, address = self._transport, self._party.addresses[member]
        return transport.why(address, self._host, member, transport.limits.ask_seconds)


def _last_words(link: Link) -> str:
    """The reason that the other side sent before it closed; empty if it sent none."""
    try:
        return str(link.receive(LAST_WORDS_SECONDS).get("why", ""))
    except PeerError:
        return ""


__all__ = ["SHOWN_NAMES", "Blame"]
