"""The bytes of files in an encoded tree: they are its end, so a reader can leave them out.

FORMAT.md, "Encoded tree". A tree with its files may be many gigabytes long, and what other parts of
a program need of it is short. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import accumulate, pairwise

from tierckpt._text import in_words
from tierckpt.errors import FormatError

Range = tuple[int, int]
"""Begin and end in the encoded tree."""
_MARK = b'"contents"'


def files_at_end(nbytes: int, read: Callable[[int, int], bytes]) -> dict[str, Range]:
    """The files in an encoded tree of this length, by name, in the order of their bytes.

    `read(low, high)` returns a range of it. Raises FormatError if the files are not the end.
    """
    try:
        end = 8 + int.from_bytes(read(0, 8), "little")
        text = read(8, end)
        if _MARK not in text:  # spares most trees the parsing
            return {}
        tree = json.loads(text)
        contents = (tree["tree"].get("files") or {}).get("contents", {})
        numbers = [node["v"] for node in contents.values()]
        rows = tree["tensors"]
        if numbers != list(range(len(rows) - len(numbers), len(rows))):
            raise ValueError("files are not its last tensors")
        sizes = [rows[number][1][0] for number in numbers]
        low = nbytes - sum(sizes)
        if low < end:
            raise ValueError(f"files of {sum(sizes)} bytes in {nbytes}")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise FormatError(f"not an encoded tree with files: {in_words(error)}") from error
    bounds = list(accumulate(sizes, initial=low))
    return dict(zip(contents, pairwise(bounds), strict=True))


def end_without(nbytes: int, files: dict[str, Range]) -> int:
    """The length of the tree before its files."""
    return min((low for low, _ in files.values()), default=nbytes)


__all__ = ["Range", "end_without", "files_at_end"]
