"""What README.md and docs/ say of settings, commands and one another."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from tierckpt.config import Config

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    page
    for folder in (".", "docs", "benchmarks", "examples/*")
    for page in ROOT.glob(f"{folder}/*.md")
)
WORDS = {
    "job_id": "made from `path`",
    "node": "the host's name",
    "peer_domain": "the node",
    "peer_interface": "the one towards the other nodes",
}
"""What is said of settings that are empty by default, where it is not "none"."""


def settings() -> dict[str, Any]:
    """Every flat name, with its default."""
    found: dict[str, Any] = {}
    for each in fields(Config):
        default = getattr(Config(), each.name)
        if is_dataclass(default):
            found |= {f"{each.name}_{f.name}": getattr(default, f.name) for f in fields(default)}
        else:
            found[each.name] = default
    return found


def documented() -> dict[str, str]:
    """Every name in the first column of the tables, with what the second says of its default."""
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
        # What a number means may stand behind it: "0: no limit".
        said = told[name] if name in WORDS else told[name].strip("`").split(":")[0]
        assert said == WORDS.get(name, in_words(default)), name


def in_words(default: Any) -> str:
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
    """As code hosts make them of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings}
