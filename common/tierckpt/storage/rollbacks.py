"""Rollback files: the request that `tierckpt rollback` leaves at a place, and the record of a run
that went back (see `core.rollback`).

Both lie in the directory of a node's local level, or at the root of the persistent level. They are
two files with one writer each, so that a run that stores its record never overwrites a newer
request.
"""

from __future__ import annotations

import contextlib

from tierckpt._text import in_words
from tierckpt.core.rollback import Rollback, RollbackRequest
from tierckpt.errors import CorruptShardError, FormatError, TierckptError

from .notes import Notes, Place

REQUEST, RECORD = "rollback-request.json", "rollback.json"
KIND = "rollback"

Rollbacks = tuple[tuple[RollbackRequest, ...], tuple[Rollback, ...], tuple[Exception, ...]]
"""Requests and records of one place, at most one of each; and the errors of unreadable ones."""


class RollbackFiles:
    """The two files of one directory, or of a persistent level. One thread. Methods raise OSError
    and PersistentError; those that read also CorruptShardError and FormatError."""

    def __init__(self, place: Place) -> None:
        """A directory, or a store, which stays the caller's."""
        self._notes = Notes(place)

    @property
    def where(self) -> str:
        """The place, for messages."""
        return self._notes.where

    def all(self) -> Rollbacks:
        """The request and the record, as far as they exist and are readable. A damaged request
        does not hide the record. Raises nothing but a client's own errors."""
        errors: list[Exception] = []
        request = record = None
        try:
            request = self.request()
        except (OSError, TierckptError) as error:
            errors.append(error)
        try:
            record = self.record()
        except (OSError, TierckptError) as error:
            errors.append(error)
        return (request,) if request else (), (record,) if record else (), tuple(errors)

    def request(self) -> RollbackRequest | None:
        """The request that `ask` wrote; None without one."""
        values = self._notes.read(REQUEST, KIND)
        if values is None:
            return None
        try:
            return RollbackRequest(int(values["version"]), str(values["name"]), self.where)
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"{self.where}/{REQUEST} is no request: {in_words(error)}") from error

    def record(self) -> Rollback | None:
        """The record that `store` wrote; None without one."""
        values = self._notes.read(RECORD, KIND)
        if values is None:
            return None
        try:
            honoured = tuple(map(str, values["honoured"]))
            return Rollback(int(values["generation"]), int(values["version"]), honoured)
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"{self.where}/{RECORD} is no record: {in_words(error)}") from error

    def ask(self, request: RollbackRequest) -> None:
        """Write a request, in place of an earlier one; durable at return."""
        self._notes.write(REQUEST, KIND, {"version": request.version, "name": request.name})

    def cancel(self) -> None:
        """Remove the request, if there is one."""
        self._notes.remove(REQUEST)

    def store(self, record: Rollback) -> None:
        """Write the record of a run, unless it is there, durable at return; then remove the request
        if the record has its name. A damaged one is replaced."""
        with contextlib.suppress(CorruptShardError, FormatError):
            there = self.record()
            if there is not None and (there == record or there.entry > record.entry):
                self._remove_honoured(record)
                return
        values = {"generation": record.generation, "version": record.version}
        self._notes.write(RECORD, KIND, {**values, "honoured": record.honoured})
        self._remove_honoured(record)

    def _remove_honoured(self, record: Rollback) -> None:
        request = self.request()
        if request is not None and request.name in record.honoured:
            self.cancel()


__all__ = ["RollbackFiles", "Rollbacks"]
