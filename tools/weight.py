"""The weight of the code, in numbers that may only fall: weight.py [--check | --write].

`--check` compares them with tools/weight.json and ends with status 1 if one has grown; `--write`
writes the present ones there. Imports are read from the source, nothing is imported.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = Path(__file__).with_suffix(".json")
PRODUCT = ("common", "ddp_ckpt", "horovod_ckpt")
TRAINER = ("ddp_ckpt", "tierckpt", "tierckpt.checkpointer.checkpointer")
AGENT = ("tierckpt.agent.process",)
TABLE = "tierckpt.checkpointer.checkpointer"
"""The module with the table of parts."""
MEANING = {
    "modules": "modules of the product",
    "one_importer": "of them, imported by a single other module",
    "lines": "lines of the product, with docstrings",
    "trainer_lines": "lines that a training process imports when it attaches",
    "agent_modules": "modules that the agent imports when it starts",
    "deep_imports": "imports in tests that reach past the face of a folder",
    "test_lines": "lines of tests",
}

STEP = {"lines": 500, "trainer_lines": 500, "test_lines": 500}
"""What a record is rounded up to: a mended fault takes some lines, and a test."""


@dataclass(frozen=True)
class Import:
    """One name of an import statement. `module` is absolute; `early`: when the module loads."""

    module: str
    name: str
    early: bool


def module_of(path: Path) -> str:
    """The name of the module in a file, relative to the root of the checkout."""
    parts = path.with_suffix("").parts
    parts = parts[1:] if parts[0] == "common" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[Import]:
    """Of a file, relative to the root, all imports; also those in functions and for type checks."""
    package = module_of(path).split(".")
    if path.name != "__init__.py":
        package.pop()
    pending: list[tuple[ast.AST, bool]] = [(ast.parse((ROOT / path).read_text()), True)]
    while pending:
        node, early = pending.pop()
        if isinstance(node, ast.ImportFrom):
            base = [] if not node.level else package[: len(package) - node.level + 1]
            module = ".".join([*base, *filter(None, [node.module])])
            yield from (Import(module, each.name, early) for each in node.names)
        elif isinstance(node, ast.Import):
            yield from (Import(each.name, "", early) for each in node.names)
        late = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        )
        pending += ((child, early and not late) for child in ast.iter_child_nodes(node))


class Tree:
    """The modules of a checkout, and who imports whom."""

    def __init__(self) -> None:
        """Read what git tracks."""
        listed = subprocess.check_output(["git", "ls-files", "*.py"], cwd=ROOT, text=True)
        paths = [path for path in map(Path, listed.split()) if (ROOT / path).is_file()]
        self.product = {module_of(path): path for path in paths if path.parts[0] in PRODUCT}
        self.tests = [path for path in paths if path.parts[0] == "tests"]

    def lines(self, paths: Iterator[Path] | list[Path]) -> int:
        """In some files together."""
        return sum(len((ROOT / path).read_text().splitlines()) for path in paths)

    def _targets(self, path: Path, early: bool = False) -> set[str]:
        """The modules of the product that a file imports."""
        found = set()
        for each in imports_of(path):
            whole = f"{each.module}.{each.name}"
            target = whole if whole in self.product else each.module
            if target in self.product and (each.early or not early):
                found.add(target)
        return found

    @cached_property
    def one_importer(self) -> list[str]:
        """Modules that a single other module imports; without the faces of folders, and without
        the parts of a checkpointer, which their table imports. A face imports only what is public,
        or what it loads with it."""
        importers = defaultdict(set)
        faces = {name for name, path in self.product.items() if path.name == "__init__.py"}
        for name, path in self.product.items():
            lazy = name in faces and "__all__" not in (ROOT / path).read_text()
            for target in self._targets(path, early=lazy) - {name}:
                importers[target].add(name)
        alone = {name for name, by in importers.items() if len(by) == 1} - faces
        of_table = {name for name in alone if importers[name] == {TABLE}}
        parts = {name for name in of_table if "(Part):" in (ROOT / self.product[name]).read_text()}
        return sorted(alone - parts)

    def closure(self, roots: tuple[str, ...]) -> set[str]:
        """The modules that are imported with some others, the folders they are in included."""
        seen: set[str] = set()
        pending = list(roots)
        while pending:
            name = pending.pop()
            if name not in self.product or name in seen:
                continue
            seen.add(name)
            pending += self._targets(self.product[name], early=True)
            pending.append(name.rpartition(".")[0])
        return seen

    def deep_imports(self) -> int:
        """Pairs of a test file and a module other than the face of a folder."""
        faces = {name for name, path in self.product.items() if path.name == "__init__.py"}
        targets = (self._targets(path) - faces for path in self.tests)
        return sum(name.count(".") > 1 for found in targets for name in found)

    def weight(self) -> dict[str, int]:
        """All numbers, by their names in `MEANING`."""
        return {
            "modules": len(self.product),
            "one_importer": len(self.one_importer),
            "lines": self.lines(list(self.product.values())),
            "trainer_lines": self.lines([self.product[each] for each in self.closure(TRAINER)]),
            "agent_modules": len(self.closure(AGENT)),
            "deep_imports": self.deep_imports(),
            "test_lines": self.lines(self.tests),
        }


def main() -> int:
    """Print the numbers beside those of the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="status 1 if a number has grown")
    parser.add_argument("--write", action="store_true", help="make the present numbers the record")
    parser.add_argument("--list", action="store_true", help="name modules with one importer")
    options = parser.parse_args()
    tree = Tree()
    weight = tree.weight()
    if options.write:
        limits = {name: value + -value % STEP.get(name, 1) for name, value in weight.items()}
        RECORD.write_text(json.dumps(limits, indent=1) + "\n")
    record = json.loads(RECORD.read_text())
    grown = [name for name in weight if weight[name] > record[name]]
    for name, value in weight.items():
        if name in grown or not options.check:
            print(f"{value:>8,} ({record[name]:,} on record)  {MEANING[name]}")
    if options.list:
        print(*tree.one_importer, sep="\n")
    if options.check and grown:
        print("The code has grown: make it lighter, or say why in the commit and write the record.")
    return 1 if options.check and grown else 0


if __name__ == "__main__":
    sys.exit(main())
