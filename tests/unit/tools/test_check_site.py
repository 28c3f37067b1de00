"""The check of the built documentation site, on small sites with one flaw each."""

from __future__ import annotations

from pathlib import Path

import check_site
import pytest


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A sound site: two pages, a style sheet, links of every kind that a reader may click."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "site.css").write_text("body { background: url('ground.png') }")
    (tmp_path / "ground.png").touch()
    (tmp_path / "docs" / "page.html").write_text('<h1 id="here">Page</h1><a name="old"></a>')
    (tmp_path / "index.html").write_text(
        """<link rel="stylesheet" href="site.css?v=1"><link rel="canonical" href="https://x.org">
        <a href="docs/page.html#here">1</a><a href="docs/page.html#old">2</a><a href="#own">3</a>
        <p id="own"><a href="https://example.org/#x">4</a><a href="mailto:a@example.org">5</a>
        <img src="ground.png"><img src="data:image/png;base64,xx">"""
    )
    return tmp_path


def add(site: Path, text: str) -> None:
    page = site / "docs" / "page.html"
    page.write_text(page.read_text() + text)


def test_a_sound_site_has_no_problem(site: Path) -> None:
    assert list(check_site.problems(site)) == []


@pytest.mark.parametrize(
    "element",
    [
        '<script src="https://x.org/a"></script>',
        '<script src="//x.org/a"></script>',
        '<link rel="stylesheet" href="https://x.org/a">',
        '<link rel="preconnect" href="https://x.org/a">',
        '<img src="https://x.org/a">',
        '<img srcset="https://x.org/a 2x">',
        '<iframe src="https://x.org/a"></iframe>',
        '<p style="background: url(https://x.org/a)">',
        '<style>@import "https://x.org/a";</style>',
        "<style>@font-face { src: url('https://x.org/a') }</style>",
    ],
)
def test_nothing_comes_from_another_host(site: Path, element: str) -> None:
    add(site, element)
    (problem,) = check_site.problems(site)
    assert problem.startswith("docs/page.html: ")
    assert problem.endswith("x.org/a would be loaded from another host")


def test_a_style_sheet_loads_nothing_from_another_host(site: Path) -> None:
    (site / "site.css").write_text("@import url(https://x.org/a);")
    (problem,) = check_site.problems(site)
    assert problem == "site.css: https://x.org/a would be loaded from another host"


@pytest.mark.parametrize(
    ("element", "why"),
    [
        ('<a href="gone.html">', "there is no such file"),
        ('<a href="../docs">', "there is no such file"),
        ('<a href="../../etc/passwd">', "it leads out of the site"),
        ('<a href="page.html#nowhere">', "that page has no such anchor"),
        ('<a href="#nowhere">', "that page has no such anchor"),
        ('<img src="gone.png">', "there is no such file"),
        ("<style>p { background: url(gone.png) }</style>", "there is no such file"),
    ],
)
def test_addresses_within_the_site_lead_somewhere(site: Path, element: str, why: str) -> None:
    add(site, element)
    (problem,) = check_site.problems(site)
    assert problem.startswith("docs/page.html: ")
    assert problem.endswith(why)


def test_a_folder_without_pages_is_a_problem(tmp_path: Path) -> None:
    assert list(check_site.problems(tmp_path)) == [f"{tmp_path}: no page is there"]


def test_the_exit_status_reports_problems(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["check_site.py", str(site)])
    assert check_site.main() == 0
    assert capsys.readouterr().out == ""
    add(site, '<a href="gone.html">')
    assert check_site.main() == 1
    assert "gone.html" in capsys.readouterr().out
