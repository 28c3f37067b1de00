"""Stages: what each node's agent does with a version that is complete on all local disks.

The setting `stages` names them, separated by commas: `mirror /mnt/disk2`, which copies the shards
to a second disk of the node, or a stage of yours: an entry point of the group `tierckpt.stages`, a
class with the interface `Stage`:

    [options.entry_points]
    tierckpt.stages =
        index = my_package:Index

The agent makes one instance, of the text after the name: `index http://host` calls
`Index("http://host")`, and `index` alone calls `Index()`. (A list of stages that each get every
version is how VELOC's engine is built.)
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from msgspec import Struct

from tierckpt._entry_points import load
from tierckpt._text import error_text
from tierckpt.errors import ConfigError, TierckptError
from tierckpt.format.ids import ShardKey, VersionId
from tierckpt.format.manifest import Manifest
from tierckpt.format.records import VersionFacts

__all__ = ["LocalVersion", "Named", "Stage", "StageCancelledError", "StageError", "parse"]

GROUP = "tierckpt.stages"
MIRROR = "mirror"
LEVELS = ("memory", "local", "peer", "agent", "persistent")
"""Names that events use for the levels themselves."""


class StageError(TierckptError):
    """A stage cannot be made: its package is missing, or its text is wrong."""


class StageCancelledError(TierckptError):
    """The agent ends now: its job has started again with another environment."""


class LocalVersion:
    """This node's shards of a version, on the local level. They stay there until `Stage.accept`
    returns. For the thread that calls it."""

    def __init__(
        self,
        directory: Path,
        shards: tuple[ShardKey, ...],
        open_shard: Callable[[ShardKey], AbstractContextManager[tuple[memoryview, bytes]]],
        advance: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        self.directory, self.shards = directory, shards
        self.stored_bytes = 0
        """Bytes counted by `advance`."""
        self._open, self._advance = open_shard, advance

    @property
    def id(self) -> VersionId:
        """The version: its run's generation, and the number of completed steps."""
        return self.shards[0].id

    @cached_property
    def facts(self) -> VersionFacts:
        """What is known of the version. Raises as `open`."""
        with self.open(self.shards[0]) as (_, manifest):
            return Manifest.decode(manifest).facts

    def open(self, shard: ShardKey) -> AbstractContextManager[tuple[memoryview, bytes]]:
        """A shard's bytes, as FORMAT.md describes the file of a shard without codecs, and those of
        its manifest. They are read-only, and their checksums were compared.

        Raises OSError and CorruptShardError, and CodecError for an encoded shard without its key.
        """
        return self._open(shard)

    def advance(self, nbytes: int) -> None:
        """Count bytes as done, so that nobody takes a long work for one that hangs. Raises
        StageCancelledError when the agent has to end: leave everything as a SIGKILL would."""
        self._advance(nbytes)
        self.stored_bytes += nbytes


class Stage(Protocol):
    """A stage. Its methods are called by one thread of the agent, one version after the other, the
    newest of those that wait."""

    def accept(self, version: LocalVersion) -> None:
        """Do the work for one version. Done when it returns; an exception is reported to the user
        with its text, and costs this version only.

        An agent that was killed may be followed by one that gets the same version again, or only a
        later one.
        """
        ...


class Named(Struct, frozen=True):
    """A stage of the setting: its name, and the text after that."""

    name: str
    argument: str

    def __str__(self) -> str:
        return f"{self.name} {self.argument}".strip()

    def make(self) -> Stage:
        """The stage. Raises StageError."""
        made = _maker(self.name)
        try:
            stage: Stage = made(self.argument) if self.argument else made()
        except Exception as error:
            raise StageError(
                f"the stage {str(self)!r} cannot be made: {error_text(error)}"
            ) from error
        return stage


def parse(setting: str) -> list[Named]:
    """The stages of a setting, which are not made or imported yet. Raises ConfigError for the
    wrong use of a name of ours, and for a stage that is named twice."""
    found = list[Named]()
    for part in filter(None, map(str.strip, setting.split(","))):
        name, _, argument = part.partition(" ")
        stage = Named(name, argument.strip())
        if name in LEVELS:
            raise ConfigError(f"stages is {setting!r}; {name} is a level, with settings of its own")
        if name == MIRROR and not Path(stage.argument).is_absolute():
            raise ConfigError(
                f"stages is {setting!r}; mirror takes an absolute path, for example "
                "'mirror /mnt/disk2'"
            )
        if stage in found:
            raise ConfigError(f"stages is {setting!r}; it names {str(stage)!r} twice")
        found.append(stage)
    return found


def check(setting: str) -> None:
    """Report at the start what a version would meet later: a name that nobody knows, a package that
    cannot be imported. Raises ConfigError."""
    for stage in parse(setting):
        try:
            _maker(stage.name)
        except StageError as error:
            raise ConfigError(f"stages is {setting!r}: {error}") from None


def mirrors(setting: str, job: str) -> list[Path]:
    """Directories where the mirrors of a setting keep the shards of a job."""
    return [mirror_of(each.argument, job) for each in parse(setting) if each.name == MIRROR]


def mirror_of(place: str, job: str) -> Path:
    """Directory of a job in a mirror's place, which many jobs may share."""
    return Path(place, job)


def _maker(name: str) -> Callable[..., Any]:
    if name == MIRROR:
        # By name: the settings check theirs, and know no agent.
        return importlib.import_module("tierckpt.agent.mirror").Mirror  # type: ignore[no-any-return]
    return load(GROUP, "stage", name, [MIRROR], StageError)
