"""Unused: the journal on this node whose steps a restart does not make, in words.

Nobody loses steps without a word because a setting is missing, or the number of ranks is another.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from tierckpt.format.ids import VersionId

from .chain import chain_from
from .segments import FOLDER, JournalReader, names_in

UNUSED = (
    "the journal in {folder} leads from v{base} on to v{last}, and {why}: the steps after "
    "v{reached} are lost. {remedy} to have them again"
)
NOT_SET = ("local_journal_steps is not set", "Start again with local_journal_steps")
NOT_STRICT = ("restore(strict=False) makes no steps again", "Start again with strict=True")
OTHER_RANKS = ("it is of {were} rank(s), this job has {size}", "Start again with {were} rank(s)")


def unused_journal(
    directory: str,
    base: VersionId,
    began: tuple[int, int],
    texts: tuple[str, str],
    size: int,
    reached: VersionId | None = None,
) -> str:
    """Describe the longest journal in this local directory that follows the version `base`, if it
    leads further than to `reached`; empty without one. Never raises.

    Args:
        directory: the local directory.
        base: the version that was restored.
        began: see `chain_from`.
        texts: the reason why it is not used, and the remedy.
        size: number of ranks of this job.
        reached: how far this job's own journal has led; only journals of another number of ranks
            count then.
    """
    folder, longest = Path(directory) / FOLDER, (reached or base).version
    text = ""
    there = names_in(folder)
    for shards, shard in sorted({(n.base.shards, n.base.shard) for n in there}):
        if reached is not None and shards == size:
            continue
        names = [n for n in there if (n.base.shards, n.base.shard) == (shards, shard)]
        with closing(JournalReader(folder, names)) as reader:
            keys = [key for _, key in reader.records]
        chain = chain_from(base, [keys], began)
        if chain and chain[-1].id.version > longest:
            longest = chain[-1].id.version
            why, remedy = (each.format(were=shards, size=size) for each in texts)
            text = UNUSED.format(
                folder=folder,
                base=base.version,
                last=longest,
                why=why,
                reached=(reached or base).version,
                remedy=remedy,
            )
    return text


__all__ = ["NOT_SET", "NOT_STRICT", "OTHER_RANKS", "unused_journal"]
