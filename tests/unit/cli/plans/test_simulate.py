"""`tierckpt simulate`, as a user calls it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.support.event_stream import EventStream
from tierckpt.cli import run_command
from tierckpt.simulation import EXAMPLES, TABLES, Level

ROOT = Path(__file__).resolve().parents[4]


def said(capsys: pytest.CaptureFixture[str], *line: str | Path) -> str:
    assert run_command(["simulate", *map(str, line)]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *line: str | Path) -> str:
    assert run_command(["simulate", *map(str, line)]) == 1
    return capsys.readouterr().err


@pytest.fixture
def job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(said(capsys, "--example"))
    return path


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_example_is_printed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "--example", name) == EXAMPLES[name]


def test_the_example_runs(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, job, "--replicas", "3")
    assert "training that counted" in out
    assert "restore from peer" in out
    assert "Simulated goodput 99." in out
    assert "(3 replicas, seed 1, 95 % confidence)" in out
    assert said(capsys, job, "--replicas", "3") == out


def test_the_page_has_the_real_output(
    job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(job.parent)
    page = (ROOT / "docs" / "simulate.md").read_text()
    shown = page.split("$ tierckpt simulate job.toml\n")[1].split("```")[0].splitlines()
    real = iter(said(capsys, "job.toml").splitlines())
    assert [line for line in shown if line != "..." and line not in real] == [], "in this order"


def test_every_key_is_on_the_page() -> None:
    page = (ROOT / "docs" / "simulate.md").read_text()
    table = page.split("## The scenario")[1].split("## The model")[0]
    named = set(re.findall(r"`([a-z_]+)`", table))
    for kind in (*TABLES.values(), Level):
        keys = {
            name.removesuffix("_seconds").removesuffix("_bytes") for name in kind.__struct_fields__
        }
        assert keys - {"name", "policy"} <= named, kind


def test_json_and_values_from_the_command_line(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads(said(capsys, job, "--json", "--set", "job.ranks=64", "--seed", "5"))
    assert found["simulated"] is True
    assert found["scenario"]["job"]["ranks"] == 64
    assert found["scenario"]["seed"] == 5
    assert found["goodput"]["mean"] > 0.9
    assert 0 < found["goodput"]["error"] < 0.1
    assert found["levels"]["persistent"]["files_per_version"] == 3
    assert sum(share["mean"] for share in found["phases"].values()) == pytest.approx(1)


def test_values_side_by_side(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = (job, "--vary", "job.ranks=64,512", "--replicas", "2")
    out = said(capsys, *line).splitlines()
    assert [text.split()[0] for text in out[:3]] == ["value", "job.ranks=64", "job.ranks=512"]
    found = json.loads(said(capsys, *line, "--json"))
    assert found["job.ranks=512"]["scenario"]["job"]["ranks"] == 512


def test_costs_of_a_jobs_own_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two ranks, steps of 2 s, a version in memory at every step and on disk at every fifth; one
    restart of 21 s."""
    for rank in range(2):
        stream = EventStream(tmp_path / "events", rank)
        stream.start(0, 3, 4, 5, world=2)
        stream.restored(7, 0, 1.0)
        stream.progress(8, 1, 0.1, begun=0, run="one")
        for version in range(1, 11):
            at = 7 + 2 * version
            stream.write("sealed", at, version=version, level="memory", seconds={"stall": 0.01})
            if version % 5 == 0:
                stream.write(
                    *("committed", at + 1), version=version, level="local", seconds={"write": 1.0}
                )
        stream.start(40, 43, 44, 45, world=2)
        stream.restored(47, 10, 1.0)
        stream.progress(49, 11, begun=10, run="two")
        stream.progress(71, 20)
        stream.closed(72, 20, 1.0)
    line = (
        "--events",
        tmp_path / "events",
        "--set",
        "job.state=201MB",
        "--json",
        "--replicas",
        "2",
    )
    short = ("--set", "job.length=4h")
    found = json.loads(said(capsys, *line, *short, "--set", "levels.local.cost=20ms"))
    given = found["scenario"]
    assert (given["job"]["ranks"], given["job"]["step_seconds"]) == (2, pytest.approx(2.0))
    memory, local = given["levels"]
    assert (memory["every_steps"], local["every_steps"]) == (1, 5)
    assert (memory["cost_seconds"], local["cost_seconds"]) == (pytest.approx(0.01), 0.02)
    assert local["write_seconds"] == pytest.approx(1.0)
    assert memory["restore_seconds"] == pytest.approx(1.0)
    assert given["failures"]["job_every_seconds"] == pytest.approx(72.0)
    assert 0.3 < found["goodput"]["mean"] < 0.9

    scenario = tmp_path / "job.toml"
    scenario.write_text('[job]\nstate = "1GB"\nlength = "4h"\n[failures]\nnode_every = "1d"\n')
    found = json.loads(said(capsys, "--events", tmp_path / "events", scenario, "--json"))
    given = found["scenario"]
    assert given["job"]["state_bytes"] == 1e9, "the file is no events"
    assert given["failures"]["node_every_seconds"] == 86400
    assert given["failures"]["job_every_seconds"] is None, "replaced by the file"


def test_without_rates_there_are_no_failures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.toml"
    path.write_text('[job]\nstep = "1s"\nstate = "1GB"\n[levels.memory]\nevery_steps = 1\n')
    out = said(capsys, path, "--replicas", "1")
    assert "No failures: give their rates in [failures], such as node_every" in out
    assert "Simulated goodput 100.00 % in 30 d" in out


def test_best_intervals_are_simulated_too(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, job, "--best", "--replicas", "2")
    assert f"{job}, best intervals:" in out
    assert out.count("Simulated goodput") == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("failures.job_every=2s", "a failure comes every 2 s on average, and a restart takes"),
        ("levels.persistent.every=200d", "persistent: the first version would come after 200 d"),
        ("job.step=100d", "a step of 100 d is longer than the run of"),
    ],
)
def test_what_makes_no_sense_is_noted(
    change: str, words: str, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = (job, "--replicas", "1", "--set", "job.length=1d")
    assert f"Note: {words}" in said(capsys, *line, "--set", change)
    assert "Note: " not in said(capsys, *line)


def test_where_the_lost_time_goes(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Shares of what is not training: they add up."""
    out = said(capsys, job, "--replicas", "2", "--set", "failures.node_every=30d")
    (line,) = [each for each in out.splitlines() if each.startswith("Of the other ")]
    shares = [int(each) for each in re.findall(r"(\d+) % [wst]", line)]
    assert sum(shares) == pytest.approx(100, abs=1)
    assert "waiting, while no rank trains" in line


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ([], "no scenario; give a file, which `tierckpt simulate --example > job.toml` writes"),
        (["nowhere.toml"], "there is no file nowhere.toml"),
        (["JOB", "--set", "ranks"], "write a name and a value, such as job.ranks=1024"),
        (["JOB", "--set", "job.rank=4"], "did you mean ranks?"),
        (["JOB", "--vary", "job.ranks"], "write a name and values"),
        (["JOB", "--set", "job.step=200"], "[job] step: 200 has no unit; write for example '200s'"),
        (["JOB", "--replicas", "-1"], "replicas is -1; it must not be negative"),
        (["JOB", "--set", "levels.peer.scheme='rs 40+2'"], "needs 42 failure domains per group"),
        (["JOB", "--set", "failures.process_every=1s"], "failures would be simulated"),
        (["JOB", "--set", "levels.peer.scheme=raid"], "valid: none, partner"),
    ],
)
def test_nonsense_is_refused(
    line: list[str], words: str, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(capsys, *(str(job) if each == "JOB" else each for each in line))


def test_without_simpy_the_extra_is_named(
    job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "simpy", None)
    assert "pip install 'tierckpt[simulate]'" in refused(capsys, job)
