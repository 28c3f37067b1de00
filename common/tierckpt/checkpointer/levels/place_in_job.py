"""Place in the job: what callbacks are told about a rank."""

from __future__ import annotations

from tierckpt.callbacks import Job
from tierckpt.config import Config
from tierckpt.core.levels import LEDGERS, MEMORY
from tierckpt.group import Group, Node
from tierckpt.storage.memory.job_directory import job_directory


def place_in_job(config: Config, group: Group, node: Node) -> Job:
    """This rank's place in its job."""
    levels = tuple(str(e) for e in LEDGERS if e == MEMORY or config.uses(e))
    job_id = job_directory(config).job
    return Job(job_id, group.rank, group.size, node.ranks.index(group.rank), levels)


__all__ = ["place_in_job"]
