"""`tierckpt import`: a foreign state becomes a version that a job's restart takes."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass

from tierckpt._text import is_url, some
from tierckpt.config import Config, load_config
from tierckpt.errors import ConfigError, CorruptShardError, LeaseHeldError
from tierckpt.format.facts import VersionFacts
from tierckpt.format.ids import VersionId
from tierckpt.offline.folders import MissingPathError
from tierckpt.offline.survey import Survey, survey
from tierckpt.offline.verify import verify
from tierckpt.restore.progress import Progress
from tierckpt.storage.local.directory_claim import DirectoryClaim
from tierckpt.storage.local.store import LocalStore
from tierckpt.storage.memory.job_directory import job_directory
from tierckpt.storage.persistent import PersistentStore
from tierckpt.storage.persistent.lease import Lease

from .foreign_state import ForeignState
from .foreign_version import ForeignVersion
from .version_image import VersionImage


@dataclass(frozen=True)
class Imported:
    """A version that was written and verified."""

    facts: VersionFacts
    level: str
    nbytes: int
    foreign: ForeignState
    iteration_known: bool
    """False if the iteration is a guess: the number of optimizer steps."""


def import_state(
    foreign: ForeignState,
    path: str,
    *,
    persistent: bool = False,
    iteration: int | None = None,
    force: bool = False,
) -> Imported:
    """Write the state as a version of the job with this `path`, and verify it.

    Args:
        foreign: the state; it gets lines in `not_taken` for what a version cannot store.
        path: a job's `path` (a directory on this node) or its `persistent_path`.
        persistent: `path`, a directory, is a persistent_path; a URL always is one.
        iteration: the number that `restore()` returns; default: as in the source, else the number
            of steps.
        force: write it although there are versions; a restart takes the new one then.

    The version appears when it is complete: after an error, or if the process is killed, there is
    none. Raises ConfigError if there are versions already, or a running job, or `path` cannot be
    written; CorruptShardError if the written bytes are not those that were read.
    """
    persistent = persistent or is_url(path)
    config = load_config({"persistent_path" if persistent else "path": path})
    there = _survey(path)
    _refuse_used(path, there, persistent, force)
    parts = ForeignVersion(foreign)
    job = config.job_id if persistent else job_directory(config).job
    facts = _facts(foreign, job, there, iteration)
    image = VersionImage(facts, parts.tensors, parts.tree(), parts.structure, parts.tied)
    if persistent:
        _flush(config, facts, image)
    else:
        try:
            with _claimed(config, facts):
                _commit(config, facts, image)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error}") from error
    _verify(path, facts)
    known = iteration is not None or foreign.iteration is not None
    level = "persistent" if persistent else "local"
    return Imported(facts, level, image.most_bytes, foreign, known)


def _survey(path: str) -> Survey:
    with suppress(MissingPathError):
        return survey(path)
    return Survey()


def _refuse_used(path: str, there: Survey, persistent: bool, force: bool) -> None:
    if there.living:
        raise ConfigError(f"{path} is in use by a running job; end it, or give another path")
    if there.troubles:
        raise ConfigError(f"{path} cannot be read completely: {some(there.troubles)}")
    levels = {copy.place.level for copy in there.copies}
    if persistent and levels and "persistent" not in levels:
        raise ConfigError(f"{path} is the path of a job, and no persistent_path; omit --persistent")
    if not persistent and levels == {"persistent"}:
        raise ConfigError(f"{path} is a persistent_path; give --persistent, too")
    if there.copies and not force:
        names = some([f"v{n}" for n in sorted({copy.key.id.version for copy in there.copies})])
        raise ConfigError(
            f"{path} has checkpoints already ({names}). Give another path, or --force: then a "
            "restart takes the imported version, and the others stay until retention removes them"
        )


def _facts(
    foreign: ForeignState,
    job: str,
    there: Survey,
    iteration: int | None,
) -> VersionFacts:
    generation = 1 + there.generation
    steps = foreign.count_steps()
    at = foreign.iteration if iteration is None else iteration
    at = (steps or 0) if at is None else at
    number = max(1, at if steps is None else steps)
    return VersionFacts(
        job=job,
        run_id=uuid.uuid4().hex,
        id=VersionId(generation, number),
        shards=1,
        lineage=((generation, 0),),
        iteration=at,
        iteration_counts="calls",
    )


@contextmanager
def _claimed(config: Config, facts: VersionFacts) -> Iterator[None]:
    """Keep jobs out of the directory. Raises ConfigError if one is there."""
    claim = DirectoryClaim(config.directory, facts.run_id, 0, lambda text, severity: None)
    try:
        if refusal := claim.stake():
            raise ConfigError(refusal)
        yield
    finally:
        claim.release()


def _commit(config: Config, facts: VersionFacts, image: VersionImage) -> None:
    store = LocalStore(config.directory)
    store.create()
    with store.draft(facts.key(0), image.most_bytes) as draft:
        offset = 0
        for window in image.windows():
            draft.write(window, offset)
            offset += len(window)
        draft.sync()
        draft.commit(image.manifest)


def _flush(config: Config, facts: VersionFacts, image: VersionImage) -> None:
    place = config.persistent
    with closing(PersistentStore(place.path, **place.options())) as store:
        store.create()
        with _leased(store, facts) as lease:
            store.flush(facts, image.most_bytes, [image], lambda nbytes: lease.keep())


@contextmanager
def _leased(store: PersistentStore, facts: VersionFacts) -> Iterator[Lease]:
    """Keep jobs from flushing there. Raises ConfigError if one does."""
    lease = store.lease(facts.run_id, f"tierckpt import {facts.run_id[:8]}")
    url = store.backend.url
    try:
        lease.ensure()
    except LeaseHeldError as error:
        raise ConfigError(
            f"{url} is in use by {error.owner}; end it, or give another path. If it was killed, "
            f"its lease is still there: tierckpt takeover {url} removes it"
        ) from error
    try:
        yield lease
    finally:
        lease.release()


def _verify(path: str, facts: VersionFacts) -> None:
    there = survey(path)
    there.found = [each for each in there.found if each.facts.run_id == facts.run_id]
    there.parities = []
    with closing(Progress(False)) as bar:
        wrong = [each.why for each in verify(there, bar) if each.why]
    if wrong or not there.found:
        raise CorruptShardError(
            f"{path}: the written version is damaged: {some(wrong) or 'it is not there'}. Remove "
            f"{facts.key(0).stem}.* from it, and check the disk"
        )


__all__ = ["Imported", "import_state"]
