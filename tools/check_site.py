"""Check a built site: check_site.py FOLDER prints each problem, and ends with status 1 if any.

A problem is a link to a missing file or anchor, and anything that a browser would load from another
host: a script, a style, a font, a picture, a frame. (Links to other hosts that a reader may click
are none.) So the site works without a network, and no host learns of its readers.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("script", "img", "iframe", "embed", "source", "audio"), ("src",)),
    "video": ("src", "poster"),
    "link": ("href",),
    "object": ("data",),
    "form": ("action",),
}
"""Elements, and their attributes with an address that the browser opens by itself."""
NOT_LOADED = ("next", "prev", "author", "search", "index", "canonical")
"""Kinds of `link` that a browser does not load."""
IN_STYLE = re.compile(r"""url\(\s*["']?([^"')]+)|@import\s+["']([^"']+)""")


@dataclass
class Page(HTMLParser):
    """The addresses and anchors of one page."""

    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Initialize the parser."""
        super().__init__()
        self._in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the element's addresses and its id."""
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        follows = tag != "link" or given.get("rel") not in NOT_LOADED
        self.loaded += [given[name] for name in LOADED.get(tag, ()) if name in given and follows]
        for address in given.get("srcset", "").split(","):
            self.loaded += address.split()[:1]
        self.loaded += addresses_in_style(given.get("style", ""))
        self._in_style = tag == "style"

    def handle_data(self, data: str) -> None:
        """Collect the addresses of a style sheet in the page."""
        if self._in_style:
            self.loaded += addresses_in_style(data)

    def handle_endtag(self, tag: str) -> None:
        """End a style sheet."""
        self._in_style = self._in_style and tag != "style"


def addresses_in_style(text: str) -> list[str]:
    """The addresses that a style sheet loads."""
    return [first or second for first, second in IN_STYLE.findall(text)]


def read_pages(folder: Path) -> dict[Path, Page]:
    """Parse all pages, and the style sheets as pages that only load."""
    pages = {}
    for path in sorted(folder.rglob("*.html")):
        pages[path] = Page()
        pages[path].feed(path.read_text())
    for path in sorted(folder.rglob("*.css")):
        pages[path] = Page(loaded=addresses_in_style(path.read_text()))
    return pages


def problems(folder: Path) -> Iterator[str]:
    """Describe each problem of the site in `folder`, one line each."""
    folder = folder.resolve()
    pages = read_pages(folder)
    if not pages:
        yield f"{folder}: no page is there"
    for path, page in pages.items():
        shown = path.relative_to(folder)
        for address in page.loaded:
            parts = urlsplit(address)
            if parts.netloc or parts.scheme not in ("", "data"):
                yield f"{shown}: {address} would be loaded from another host"
        for address in dict.fromkeys([*page.links, *page.loaded]):
            if why := _broken(address, path, folder, pages):
                yield f"{shown}: {address}: {why}"


def _broken(address: str, path: Path, folder: Path, pages: dict[Path, Page]) -> str:
    """The reason why an address within the site leads nowhere; empty if it does not."""
    parts = urlsplit(address)
    if parts.netloc or parts.scheme:
        return ""
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if not target.is_relative_to(folder):
        return "it leads out of the site"
    if not target.is_file():
        return "there is no such file"
    anchor = unquote(parts.fragment)
    if (
        anchor
        and target in pages
        and target.suffix == ".html"
        and anchor not in pages[target].anchors
    ):
        return "that page has no such anchor"
    return ""


def main() -> int:
    """Check the folder that the command line names; returns the exit status."""
    if len(sys.argv) != 2:
        sys.exit("usage: check_site.py FOLDER")
    found = list(problems(Path(sys.argv[1])))
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
