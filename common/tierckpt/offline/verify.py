"""Verification of every byte that a survey found against its checksum: `tierckpt verify`."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial

from msgspec import Struct

from tierckpt.codecs.shard_coding import check_stored
from tierckpt.core.restore_plan import Found, FoundParity, Source
from tierckpt.erasure.parity_manifest import ParityManifest
from tierckpt.format.manifest import Manifest
from tierckpt.peer.parity_file import check_parity
from tierckpt.restore.progress import Progress
from tierckpt.restore.rebuild import reader_of
from tierckpt.restore.shards import LOST, READERS, FaultScope, Reads, ShardImage, in_memory
from tierckpt.storage.durable import MappedFile
from tierckpt.storage.local import LocalStore

from .catalog import manifest_at
from .survey import Copy, Survey


class Verdict(Struct, frozen=True):
    """The result for one copy of a shard, or of parity."""

    copy: Copy
    nbytes: int
    why: str
    """The damage; empty: none."""
    unchecked: str = ""
    """The reason why the content was not checked: a key or a module is missing here. The stored
    bytes are sound, unless `why` is set."""
    unread: bool = False
    """True if `why` is about access (permission, network): the bytes may be sound."""

    @staticmethod
    def of_error(copy: Copy, error: Exception) -> Verdict:
        """The result for a copy that raised this error."""
        return Verdict(
            copy, 0, str(error), unread=FaultScope.of(copy.place, error) is not FaultScope.COPY
        )


def verify(there: Survey, progress: Progress, version: int | None = None) -> Iterator[Verdict]:
    """Read all copies, one after the other, newest version first."""
    wanted = [c for c in there.copies if version is None or c.key.id.version == version]
    with ThreadPoolExecutor(READERS, "tierckpt-verify") as pool:
        for copy in sorted(wanted, key=lambda c: (c.key.id, c.place), reverse=True):
            if isinstance(copy, FoundParity):
                yield _of_parity(copy, progress)
            else:
                yield _of_shard(copy, there, pool, progress)


def _of_shard(copy: Found, there: Survey, pool: ThreadPoolExecutor, progress: Progress) -> Verdict:
    images: dict[int, ShardImage] = {}
    reads = Reads(pool, images, progress.advance, there.open_far, make_room=in_memory)
    source = Source(copy.key.shard, copy.place, reader=0, direct=False)
    try:
        reads.open(copy.key.id, copy.key.shards, copy.facts.run_id, [source])
        failures = reads.finish()
        nbytes = sum(len(image.view) for image in images.values())
    finally:
        for image in images.values():
            image.close()
    if failures and failures[0].undecodable:
        return _as_stored(copy, there, failures[0].why)
    if failures:
        return Verdict(
            copy, nbytes, failures[0].why, unread=failures[0].blame is not FaultScope.COPY
        )
    return Verdict(copy, nbytes, "")


def _as_stored(copy: Found, there: Survey, unchecked: str) -> Verdict:
    """Check the stored bytes by their own digests, without decoding."""
    key, place = copy.key, copy.place
    try:
        if place.level == "persistent":
            with closing(there.open_far(place)) as far:
                shard = far.open_shard(copy.facts.name, key.shard)
                nbytes = check_stored(Manifest.decode(shard.manifest), shard.read)
        else:
            store = LocalStore(place.where)
            record = Manifest.decode(store.read_manifest(key))
            nbytes = check_stored(record, partial(store.read, key))
    except LOST as error:
        return Verdict.of_error(copy, error)
    return Verdict(copy, nbytes, "", unchecked)


def _of_parity(copy: FoundParity, progress: Progress) -> Verdict:
    store = LocalStore(copy.place.where)
    try:
        record = ParityManifest.decode(store.read_manifest(copy.key))
        with closing(MappedFile(store.open_image(copy.key))) as file:
            nbytes = check_parity(record, reader_of(file.view, file.bring))
    except LOST as error:
        return Verdict.of_error(copy, error)
    progress.advance(nbytes)
    return Verdict(copy, nbytes, "")


def is_there(copy: Copy, there: Survey) -> bool:
    """Whether the copy still exists, as far as visible: a running job retires old versions."""
    key, place = copy.key, copy.place
    with suppress(*LOST):
        if isinstance(copy, FoundParity):
            return LocalStore(place.where).has(key)
        if place.level != "persistent":
            return manifest_at(key, place) is not None
        with closing(there.open_far(place)) as store:
            return store.exists(copy.facts.name)
    return True
