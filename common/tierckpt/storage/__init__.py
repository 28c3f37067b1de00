"""Storage: bytes on this machine and in stores. No torch."""

from typing import TYPE_CHECKING

from tierckpt import lazy_exports

if TYPE_CHECKING:
    from .claims import CLAIM_PREFIX, Claim, DirectoryClaim, Launch, claims_in, is_claimed
    from .claims import launch_of, node_named, smallest
    from .durable import REFUSALS, DirectFile, MappedFile, Mount, locks_are_local, make, mount_of
    from .file_lock import close as close_lock, holder, lock_shared, unlock
    from .guarantees import try_directory
    from .health import PROBE_BYTES, Need, Room, check_directory, check_memory, examine
    from .health import memory_room, size_text
    from .inventory import look_at_persistent, take_inventory
    from .job_directory import JobBusyError, JobDirectory, JobFinishedError
    from .job_directory import job_directory as directory_of_job, job_id_of, jobs_at, take_lock
    from .job_directory import watched_directories
    from .local import ENCODED_SUFFIX, CommitTimes, LocalStore, open_encoded
    from .marks import LocalPins, PersistentPins, local_suspects, persistent_suspects
    from .notes import ForkMarks, OriginFile, RunRecords
    from .routed import end_without, files_at_end
    from .slot_pool import NoSlotError, SlotPool
    from .slots import ImageFile, Slot, read_seal, seal_area_bytes, sealed_at

__getattr__ = lazy_exports(__name__)
