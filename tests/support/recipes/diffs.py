"""Short diffs without line numbers, as in docs/scripts.md and examples/recipes.

    --- nanoGPT/train.py
     import torch
    +import ddp_ckpt
    @@
    -X, Y = get_batch('train')
    +X, Y = next(batches)

A line starts with a space (it is in the file), `-` (it is removed) or `+` (it is added). `@@`
separates changes that are apart. A line that ends with ` ...` stands for every line that starts so.
"""

from __future__ import annotations

import re
from pathlib import Path

SHORT = " ..."


class NotFoundError(Exception):
    """The file has no lines as in the diff: another version of the script."""


def blocks_of(page: Path) -> dict[str, str]:
    """The diffs of a page, and of the files that it links, by the folder (the repository) that the
    first line names."""
    found: dict[str, str] = {}
    shown = page.read_text()
    files = re.findall(r"\]\((\S+\.diff)\)", shown)
    blocks = re.findall(r"```diff\n(.*?)```", shown, re.DOTALL)
    for text in (*blocks, *((page.parent / name).read_text() for name in files)):
        repository = text.removeprefix("--- ").partition("/")[0]
        found[repository] = found.get(repository, "") + text
    return found


def of_file(diff: str, folder: Path) -> str:
    """The parts of a diff for files that are in `folder`: a page may have several scripts of one
    repository."""
    parts = re.split(r"^(?=--- )", diff, flags=re.MULTILINE)
    names = [part.removeprefix("--- ").partition("\n")[0].strip() for part in parts]
    return "".join(p for p, name in zip(parts, names, strict=True) if (folder / name).is_file())


def apply(diff: str, folder: Path) -> None:
    """Change the files in `folder`, which has the repositories. Raises NotFoundError."""
    for part in re.split(r"^--- ", diff, flags=re.MULTILINE)[1:]:
        name, _, changes = part.partition("\n")
        path = folder / name.strip()
        path.write_text(changed(path.read_text(), changes, name))


def changed(text: str, changes: str, name: str) -> str:
    """The text of one file with all changes, which are in the file's order."""
    lines, start = text.splitlines(), 0
    for change in re.split(r"^@@\n", changes, flags=re.MULTILINE):
        edits = [(edit[:1] or " ", edit[1:]) for edit in change.splitlines()]
        there = [line for sign, line in edits if sign != "+"]
        at = _place(lines, there, start)
        if at is None:
            raise NotFoundError(f"{name} has no lines, after line {start}:\n" + "\n".join(there))
        new: list[str] = []
        old = iter(lines[at : at + len(there)])
        for sign, line in edits:
            if sign == "+":
                new.append(line)
            elif sign == " ":
                new.append(next(old))
            else:
                next(old)
        lines[at : at + len(there)] = new
        start = at + len(new)
    return "\n".join(lines) + "\n"


def _place(lines: list[str], there: list[str], start: int) -> int | None:
    for at in range(start, len(lines) - len(there) + 1):
        pairs = zip(lines[at:], there, strict=False)
        if all(_is(line, wanted) for line, wanted in pairs):
            return at
    return None


def _is(line: str, wanted: str) -> bool:
    if wanted.endswith(SHORT):
        return line.startswith(wanted.removesuffix(SHORT))
    return line.rstrip() == wanted.rstrip()


__all__ = ["NotFoundError", "apply", "blocks_of", "changed", "of_file"]
