"""The `persistent` level: versions that outlive nodes, allocations and machines.

    store = PersistentStore("s3://bucket/prefix")            # or a directory
    store.flush(facts, largest_bytes, sources, FlushPacer(...))  # each node's agent, its own shards
    store.versions(); store.read_manifest(name)              # any process
    store.open_shard(name, 3).read(offset, nbytes)

Standard library and xxhash only; obstore and fsspec are imported for URLs.
docs/internals/persistent.md has the protocols and their reasons, FORMAT.md the bytes.
"""

from tierckpt.config import RetentionPolicy
from tierckpt.core.retention import HeldVersion
from tierckpt.errors import FlushCancelledError, LeaseHeldError, PersistentError
from tierckpt.format.ids import VersionName
from tierckpt.format.records import VersionManifest

from .backend import WINDOW_BYTES, Content, FlushPacer, RetryPolicy, RetryingBackend, SystemClock
from .backend import Throttle, advice, is_transient, lacks_room
from .backends import PosixBackend, open_backend
from .lease import LEASE_SECONDS, Lease, LeaseKeeper, LeaseRecord
from .object_stores import ObstoreBackend
from .shards import ShardReader, ShardSource
from .store import FlushResult, PersistentStore
