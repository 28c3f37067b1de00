"""The files of a restored version: names to paths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tierckpt.errors import TierckptError


class RestoredFiles(Mapping[str, str]):
    """A mapping from the names of files to paths, where a program can read them.

    The files stay until the next version begins, or until `Files.close`. They are copies: a program
    may open them for writing as well.
    """

    def __init__(self, number: int, name: str, by_rank: Mapping[int, Mapping[str, str]]) -> None:
        self.number = number
        """Number of the version."""
        self.name = name
        """Name of the version; its number as text if none was given."""
        self.by_rank = by_rank
        """The same mapping for each rank of the former run whose files were asked for."""
        self.levels: dict[str, int] = {}
        """Number of ranks' shares by the level that they were read from."""

    def _find(self, name: str) -> str:
        found = {rank: files[name] for rank, files in self.by_rank.items() if name in files}
        if not found:
            raise KeyError(name)
        if len(found) > 1:
            raise TierckptError(
                f"ranks {', '.join(map(str, found))} of the former run each have a file {name!r}: "
                "use by_rank[rank][name]"
            )
        return next(iter(found.values()))

    def __getitem__(self, name: str) -> str:
        """The path of a file. Raises KeyError if there is none of that name, TierckptError if
        several ranks have one."""
        return self._find(name)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for files in self.by_rank.values() for name in files))

    def __len__(self) -> int:
        return len({name for files in self.by_rank.values() for name in files})

    def __bool__(self) -> bool:
        """True: something was restored, even if this rank has no file in it."""
        return True

    def __repr__(self) -> str:
        return f"RestoredFiles({self.name!r}, {dict(self.by_rank)!r})"


__all__ = ["RestoredFiles"]
