"""Write the typed settings of `common/tierckpt/settings.py` from `Config`, which declares them.

`python tools/make_settings.py` after a change of a setting; a test compares.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

from tierckpt.config import AUTOMATIC, FOLDERS, KEEP, STORAGE_OPTIONS, TABLES

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "common" / "tierckpt" / "config.py"
TARGET = ROOT / "common" / "tierckpt" / "settings.py"
BEGIN, END = '    """Every setting of `Config` by its flat name."""\n', "\n\nclass Arguments("
PATHS = (*FOLDERS, "fork_from", "persistent_path")
TYPES = {"Steps": 'int | Literal["auto"]'}
"""In place of an alias, which says nothing to a user."""
INDENT, WIDTH = "    ", 100
QUOTES = '"""'


def declared(class_name: str, prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Yield the flat name, the type, the default and the meaning of each setting of a class."""
    tree = ast.parse(CONFIG.read_text())
    (found,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == class_name)
    for each, after in zip(found.body, found.body[1:], strict=False):
        if not isinstance(each, ast.AnnAssign) or not isinstance(each.target, ast.Name):
            continue
        kind, name = ast.unparse(each.annotation), each.target.id
        if name in TABLES:
            yield from declared(kind, f"{name}_")
            continue
        assert each.value is not None, name
        assert isinstance(after, ast.Expr), name
        assert isinstance(after.value, ast.Constant), name
        default = each.value
        if isinstance(default, ast.Call):  # field(default=...)
            default = next(k.value for k in default.keywords if k.arg == "default")
        meaning = " ".join(str(after.value.value).split())
        yield f"{prefix}{name}", kind, ast.unparse(default).replace("'", '"'), meaning


def lines() -> Iterator[str]:
    """Yield the lines of the class's body."""
    for name, kind, default, meaning in declared("Config"):
        assert (kind == "Steps") == (name in AUTOMATIC), name
        kind = "str | os.PathLike[str]" if name in PATHS else TYPES.get(kind, kind)
        kind = "str | Mapping[str, Any]" if name == STORAGE_OPTIONS else kind
        kind = "str | int" if name in KEEP else kind
        yield f"{INDENT}{name}: {kind}"
        text = f"{QUOTES}{meaning} Default: `{default}`.{QUOTES}"
        for line in textwrap.wrap(text, WIDTH - len(INDENT), break_on_hyphens=False):
            yield INDENT + line


def written(text: str) -> str:
    """Return the module's text with the settings as they are declared now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    body = "\n".join(lines())
    return f"{before}{BEGIN}\n{body}\n{END}{after}"


if __name__ == "__main__":
    TARGET.write_text(written(TARGET.read_text()))
