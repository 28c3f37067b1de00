"""`tierckpt report`: the page of real jobs, read by a parser and by a browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tierckpt.agent.processor import _clock_of, _read_usage
from tierckpt.cli import run_command
from tierckpt.testing import TinyJob

pytest.importorskip("matplotlib")

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "report.md").read_text()

FIGURES = [
    "Time by run, and the shares of all",
    "Parts of each restart",
    "Newest version on each level",
    "Cost of each copy",
    "A step of median duration",
    "Cores in use on the node of the first rank, for 20 s at most",
]
"""Of a job of one rank, which makes no allreduce."""
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), "")
LOOK = """<script>
function box(e) { const b = e.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom] }
document.body.innerText = JSON.stringify([...document.querySelectorAll("figure svg")].map(svg => ({
    title: svg.getAttribute("aria-label"), box: box(svg),
    texts: [...svg.querySelectorAll("text")].map(t => [t.textContent, ...box(t)]),
    drawn: [...svg.querySelectorAll("path, use")].filter(p => box(p)[2] > box(p)[0]).length,
})))
</script>"""


class Page(HTMLParser):
    """What a page has: figures, headings, rows of tables, links, and ids."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.figures: list[str] = []
        self.rows: list[list[str]] = []
        self.texts: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        if tag == "svg":
            self.figures.append(values["aria-label"] or "")
        self.links += [values[n] or "" for n in ("src", "href", "xlink:href") if n in values]
        if tag not in ("meta", "link", "path", "use", "rect"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            assert self.open.pop() == tag, "an element is closed before one inside it"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th") and self.rows:
            self.rows[-1].append(data)
        elif self.open and self.open[-1] not in ("style", "svg", "g"):
            self.texts.append(data)


@pytest.fixture(scope="module")
def example() -> dict[str, str]:
    """The settings in the example of the page, by their names in Python."""
    found = re.findall(r"TIERCKPT_(\w+)=(\S+)", re.findall(r"```sh\n(.*?)```", PAGE, re.S)[0])
    return {name.lower(): value for name, value in found}


@pytest.fixture(scope="module")
def jobs(example: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`job`, as in the example: it lost some steps and continued; and `<other>`, a fork of it
    without events and without a trace."""
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "memory").mkdir()
    places: dict[str, Any] = {"shm_dir": str(folder / "memory"), "local_keep": 10_000}
    recorded = {name: str(folder / value) for name, value in example.items()}
    usage = Path(recorded["trace_dir"], "usage-r00000.jsonl")

    def life(restore: int | None, **settings: Any) -> None:
        with TinyJob(**settings) as job:
            job.restore(restore)
            job.run(job.iteration + 5)
            lines = len(usage.read_text().splitlines()) if usage.exists() else 0
            while not usage.exists() or len(usage.read_text().splitlines()) < lines + 4:
                job.run(job.iteration + 1)
                time.sleep(0.02)  # the agent needs a core, too
            if restore is None:
                raise KeyboardInterrupt

    all_of_it = {**places, **recorded}
    with (
        mock.patch("tierckpt.goodput.heartbeat.PERIOD_SECONDS", 0.0),
        mock.patch("tierckpt.tracing.recorder.STEPS", 100_000),
    ):
        with pytest.raises(KeyboardInterrupt):
            life(None, **all_of_it)
        life(3, **all_of_it)
    own = Path(recorded["events_dir"], "events-r00000.jsonl")
    (own.parent / "process-set-1").mkdir()  # what a process set records does not count
    foreign = own.read_text().replace('"version":1,', '"version":7777,')
    (own.parent / "process-set-1" / own.name).write_text(foreign)
    with TinyJob(folder / "$other<", fork_from=f"{recorded['path']}@v3", **places) as job:
        job.restore()
        job.run(job.iteration + 2)
    return folder


def written(folder: Path, *arguments: str) -> str:
    """In a process of its own: matplotlib keeps fonts open for as long as there is one."""
    command = [sys.executable, "-m", "tierckpt", *arguments]
    path = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'common'}"}
    done = subprocess.run(
        command, cwd=folder, env=path, capture_output=True, text=True, timeout=200, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def pages(jobs: Path) -> dict[str, Path]:
    """The page of `job` by the example's command; that of both, with `job` found by its path."""
    (command,) = re.findall(r"^tierckpt (report job) +#", PAGE, re.MULTILINE)
    said = written(jobs, *command.split())
    assert re.fullmatch(rf"report.html: {len(FIGURES)} figures, [\d.]+ kB\n", said)
    written(jobs, "report", "job/ckpts", "$other<", "-o", "two.html")
    return {"one": jobs / "report.html", "two": jobs / "two.html"}


def test_a_page_has_every_figure_and_needs_nothing_else(pages: dict[str, Path]) -> None:
    text = pages["one"].read_text()
    page = Page(text)
    assert page.figures == FIGURES
    assert page.open == []
    assert len(text) < 1_000_000
    assert not re.search(r"https?:|@import|url\((?!#)|<script", text)
    assert all(link.startswith(("#", "data:,")) for link in page.links)
    named = re.findall(r' id="([^"]*)"', text)
    assert {link[1:] for link in page.links if link.startswith("#")} <= {*named}


def test_its_figures_are_those_of_the_records(jobs: Path, pages: dict[str, Path]) -> None:
    page = Page(pages["one"].read_text())
    events = (jobs / "job" / "events" / "events-r00000.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in events]
    for level, name in (("memory", "sealed"), ("local", "committed")):
        stored = [each for each in found if (each["name"], each["level"]) == (name, level)]
        (row,) = [row for row in page.rows if row[0] == level and "MB" not in row[1]]
        assert row[1] == str(len(stored))
    (restored,) = [each for each in found if each["name"] == "restored" and each["version"] == 3]
    (row,) = [row for row in page.rows if row[2:3] == ["v3"]]
    assert row[3] == restored["level"]
    assert ["failures", "1"] in page.rows
    shares = [row for row in page.rows if row[0].startswith(("a version is", "no version is"))]
    # On a slow machine a version is under way all the time: then no time is left for the third.
    under_way = [row for row in shares if row[0].startswith("a version is")]
    always_busy = sum(int(row[1].removesuffix(" %")) for row in under_way) >= 99  # rounded
    assert len(under_way) == 2
    assert len(shares) == 3 or always_busy
    assert any("run 2, from v3 to v" in each for each in page.texts)


def test_two_jobs_are_side_by_side_and_what_is_missing_is_named(pages: dict[str, Path]) -> None:
    text = pages["two"].read_text()
    page = Page(text)
    assert "<h3>$other&lt;</h3>" in text
    assert page.figures == FIGURES
    missing = " ".join(page.texts)
    assert "fork of v3: " in missing
    assert re.search(r"run 1, from .*/job/ckpts@v3 to v5", missing)
    assert "start the job with TIERCKPT_EVENTS_DIR=FOLDER" in missing
    assert "start the job with TIERCKPT_TRACE_DIR=FOLDER" in missing


def test_a_job_that_runs_and_has_little_has_a_page(tmp_path: Path, shm_dir: Path) -> None:
    with TinyJob(tmp_path / "job", shm_dir=str(shm_dir)) as job:
        job.run(1)
        job.settle()
        written(tmp_path, "report", "job")
    page = Page((tmp_path / "report.html").read_text())
    assert ["state", "runs (1 on this machine)"] in page.rows


def test_what_cannot_be_done_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: str) -> str:
        assert run_command(["report", *arguments, "-o", str(tmp_path / "out.html")]) == 1
        assert not (tmp_path / "out.html").exists()
        return capsys.readouterr().err

    for path in (tmp_path, tmp_path / "none"):
        assert f"{path} has nothing of a job in it; give the job's path" in refused(str(path))
    assert "two jobs beside each other at most" in refused("a", "b", "c")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "not installed: pip install 'tierckpt[plot]'" in refused(str(tmp_path))


def test_the_cores_in_use_are_those_of_the_other_process() -> None:
    """The clock of a process that has worked, and waits."""
    code = (
        "import sys, time\n"
        "while time.process_time() < 0.3: pass\n"
        "print(time.process_time(), flush=True)\n"
        "sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as child:
        assert child.stdout is not None
        spent = float(child.stdout.readline())
        found = _read_usage({"0": _clock_of(child.pid)})["0"]
        child.communicate()
    assert spent <= found < spent + 0.2
    assert _read_usage({"0": _clock_of(child.pid)}) == {}


@pytest.mark.skipif(not CHROMIUM, reason="Chromium is not installed (apt-get install chromium)")
@pytest.mark.parametrize("name", ["one", "two"])
def test_a_browser_draws_every_figure(name: str, pages: dict[str, Path], tmp_path: Path) -> None:
    look = tmp_path / "look.html"
    text = pages[name].read_text()
    look.write_text(text.replace("</body>", f"{LOOK}</body>"))
    options = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
        "--disable-background-networking --disable-component-update --enable-logging=stderr "
        f"--user-data-dir={tmp_path / 'profile'} --window-size=1200,6000 --dump-dom"
    )
    command = [CHROMIUM, *options.split(), look.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True)
    assert "CONSOLE" not in done.stderr
    (found,) = re.findall(r"<body[^>]*>(\[.*\])", done.stdout)
    seen = json.loads(found.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert [each["title"] for each in seen] == Page(text).figures
    for each in seen:
        left, top, right, bottom = each["box"]
        assert right - left > 400
        assert bottom - top > 80
        assert each["drawn"] > 5
        for what, *box in each["texts"]:  # nothing is cut off, whatever font the reader has
            inside = box[0] >= left - 1 and box[2] <= right + 1 and box[3] <= bottom + 1
            assert inside, f"{what} in {each['title']} is not inside its figure"
