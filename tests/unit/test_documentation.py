"""Statements of README.md and docs/ about settings, commands and one another."""

from __future__ import annotations

import configparser
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct
from msgspec.structs import asdict

from tierckpt.config import Config

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    page
    for folder in (".", "docs", "docs/internals", "docs/reference", "benchmarks", "examples/*")
    for page in ROOT.glob(f"{folder}/*.md")
)
DESIGN = [ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs" / "internals").glob("*.md"))]
MAX_WORDS = 150
"""Limit of words in a paragraph, an item of a list or a row of a table."""
SOURCES = [ROOT / "common" / "tierckpt", ROOT]
WORDS = {
    "job_id": "made from `path`",
    "node": "the host's name",
    "peer_domain": "the node",
    "peer_interface": "the one towards the other nodes",
}
"""Documented defaults of settings that are empty by default, if not "none"."""


def settings() -> dict[str, Any]:
    """Every flat name, with its default."""
    found: dict[str, Any] = {}
    for name, default in asdict(Config()).items():
        if isinstance(default, Struct):
            found |= {f"{name}_{each}": value for each, value in asdict(default).items()}
        else:
            found[name] = default
    return found


def documented() -> dict[str, str]:
    """Every name in the first column of the tables, with its default in the second."""
    found: dict[str, str] = {}
    text = (ROOT / "docs" / "settings.md").read_text()
    for names, defaults in re.findall(r"^\| (`.*?) \| (.*?) \|", text, re.MULTILINE):
        listed = re.findall(r"`(.*?)`", names)
        each = defaults.split(", ", len(listed) - 1) if len(listed) > 1 else [defaults]
        assert len(each) in (1, len(listed)), names
        found |= dict(zip(listed, each * len(listed), strict=False))
    return found


def test_every_setting_is_documented_with_its_default() -> None:
    told, there = documented(), settings()
    assert told.keys() == there.keys()
    for name, default in there.items():
        # The meaning of a number may follow it: "0: no limit".
        said = told[name] if name in WORDS else told[name].strip("`").split(":")[0]
        assert said == WORDS.get(name, default_text(default)), name


def default_text(default: Any) -> str:
    if isinstance(default, bool):
        return "true" if default else "false"
    return f"{default:g}" if isinstance(default, int | float) else default or "none"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """To files that are there, and to headings that they have."""
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        if anchor:
            assert anchor in _anchors(target), link


def _anchors(page: Path) -> set[str]:
    """Anchors, as code hosts make them from headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings}


# --- the documents for developers ----------------------------------------------------------------


def by_name(page: Path) -> str:
    return page.stem


@pytest.mark.parametrize("page", DESIGN, ids=by_name)
def test_no_paragraph_of_the_design_is_long(page: Path) -> None:
    long = [line[:60] for line in page.read_text().split("\n") if len(line.split()) > MAX_WORDS]
    assert not long


@pytest.mark.parametrize("page", DESIGN, ids=by_name)
def test_the_code_that_a_page_names_is_there(page: Path) -> None:
    """Modules and folders, of the core or of the repository, on lines that start with `Code:`.
    Those in parentheses are in the previous folder, and those without a folder are beside the
    previous one."""
    for line in re.findall(r"^Code: (.*)$", page.read_text(), re.MULTILINE):
        beside = SOURCES
        for name, inside in re.findall(r"`([\w/]+)`(?: \(([^)]*)\))?", line):
            found = [f for f in (s / name for s in [*SOURCES, *beside]) if _is_code(f)]
            assert found, name
            beside = [found[0].parent]
            for each in re.findall(r"`([\w/]+)`", inside):
                assert _is_code(found[0] / each), f"{name} {each}"


def _is_code(path: Path) -> bool:
    return path.is_dir() or path.with_suffix(".py").exists()


def test_every_internal_page_is_in_the_index() -> None:
    folder = ROOT / "docs" / "internals"
    listed = re.findall(r"\]\((\w+\.md)\)", (folder / "README.md").read_text())
    assert sorted(listed) == sorted(page.name for page in folder.glob("[a-z]*.md"))


def test_the_folder_map_has_each_folder_of_the_import_contract() -> None:
    """In one of its zones."""
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg")
    layers = setup["importlinter:contract:direction"]["layers"].replace("tierckpt.", "")
    wanted = {name for line in layers.strip().splitlines() for name in line.split(" | ")}
    text = (ROOT / "ARCHITECTURE.md").read_text().split("## The folders")[1]
    rows = re.findall(r"^\| .*? \| (.*?) \|$", text, re.MULTILINE)[1:]
    named = Counter(n for row in rows for n in {*re.findall(r"`(\w+)`", row)} & wanted)
    assert named.keys() == wanted - {"resumable_loader"}
    assert [name for name, zones in named.items() if zones > 1] == ["hooks"]  # it has two parts
