"""The settings of the documentation site: its build refuses flaws. `make docs` builds the site."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sphinx")

SITE = Path(__file__).resolve().parents[2] / "docs" / "site"
CONTENTS = "root: README\nsubtrees:\n  - entries:\n      - file: docs/page\n"
SOUND = {
    "README.md": "# Start\n\n[page](docs/page.md#here), [folder](docs), [code](setup.py)\n",
    "docs/page.md": "# Page\n\n## Here\n\n[back](../README.md)\n",
    "setup.py": "",
}
FLAWS = {
    "[gone](gone.md)": "target not found: 'gone.md'",
    "[gone](../gone/)": "target not found: '../gone/'",
    "[nowhere](../README.md#nowhere)": "local id not found in doc 'README': 'nowhere'",
    "[nowhere](#nowhere)": "target not found: 'nowhere'",
    "![gone](gone.png)": "image file not readable: docs/gone.png",
    "```{eval-rst}\n.. autofunction:: tierckpt.config.gone\n```": "failed to import 'gone'",
}


def build(folder: Path, files: dict[str, str]) -> subprocess.CompletedProcess[str]:
    (folder / "docs").mkdir()
    for name, text in {"contents.yml": CONTENTS, **SOUND, **files}.items():
        (folder / name).write_text(text)
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning"]
    command += ["--conf-dir", str(SITE), "-D", "external_toc_path=contents.yml"]
    command += ["-D", "checks_public_names=0", str(folder), str(folder / "out")]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_flaws_of_pages_fail_the_build(tmp_path: Path) -> None:
    """Among them a page in no section."""
    page = SOUND["docs/page.md"] + "\n" + "\n\n".join(FLAWS)
    done = build(tmp_path, {"docs/page.md": page, "docs/orphan.md": "# Orphan\n"})
    assert done.returncode == 1
    for told in (*FLAWS.values(), "docs/orphan.md: WARNING: document isn't included"):
        assert told in done.stdout, done.stdout


@pytest.fixture
def command_reference(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SITE))
    yield importlib.import_module("command_reference").command_reference
    sys.modules.pop("command_reference")


def test_commands_are_described_by_their_parsers(command_reference: Any) -> None:
    parser = argparse.ArgumentParser("tool")
    commands = parser.add_subparsers()
    pin = commands.add_parser("pin", help="keep a *version*", description="See `pin PATH *`.")
    pin.add_argument("path", metavar="A|B", help="default: %(default)s", nargs="?", default="here")
    pin.add_argument("--secret", help=argparse.SUPPRESS)
    pin.add_argument("--all", "-a", action="store_true", help="every one")
    nested = commands.add_parser("trace").add_subparsers()
    nested.add_parser("plot", help="draw one step")
    assert command_reference(parser) == (
        "\n## tool pin\n\nKeep a \\*version\\*.\n\nSee `pin PATH *`.\n\n"
        "```text\ntool pin [-h] [--all] [A|B]\n```\n\n"
        "| argument | meaning |\n|---|---|\n"
        "| `A\\|B` | default: here |\n| `--all, -a` | every one |\n"
        "\n## tool trace plot\n\nDraw one step.\n\n\n\n```text\ntool trace plot [-h]\n```\n"
    )
