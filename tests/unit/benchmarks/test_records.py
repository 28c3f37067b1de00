"""The benchmark's own bookkeeping: what is kept of a run that was cut short, and its estimates."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def modules(benchmark_module: Callable[[str], Any]) -> argparse.Namespace:
    """The benchmark's modules."""
    names = ("run", "options", "time_left", "record")
    found = {name: benchmark_module(f"lib.stall.{name}") for name in names}
    return argparse.Namespace(**found, files=benchmark_module("lib.files"))


def about(**changed: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "command": "python benchmarks/stall.py --json x.json",
        "commit": "1" * 40,
        "dirty": False,
        "changes": None,
        "date": "2026-01-01",
        "cpu": "a core",
        "cores": 2,
        "memory_bytes": 1 << 30,
        "gpu": None,
        "kernel": "6",
        "filesystem": "ext4",
        "python": "3.11",
        "torch": "2.13",
        "settings": {"model": "toy", "rounds": 3},
    }
    return {**facts, **changed}


def block(start: float, version: int, checkpoints: bool) -> dict[str, Any]:
    call = {"start": start, "call": 1e-3, "wait": 0.0, "details": {}, "durable": start + 0.1}
    rank = {
        "start": start,
        "ends": [start + 0.5, start + 1.0 + version / 100],
        "main_cpu_s": 1.0,
        "call_cpu_s": 0.0,
        "checkpoints": {str(version): call} if checkpoints else {},
    }
    return {"ranks": [rank, rank], "cpu_s": 2.5, "steps": 2, "others": 0.0}


def visit(version: int) -> dict[str, Any]:
    names = ("before", "checkpoints", "after")
    return {name: block(10.0 * i, version, name == "checkpoints") for i, name in enumerate(names)}


def bench_of(modules: argparse.Namespace, folder: Path) -> Any:
    chosen = argparse.Namespace(
        launcher="torchrun",
        methods="nothing",
        model="toy",
        every=2,
        world=2,
        rounds=2,
        device="cpu",
    )
    bench = modules.run.Bench(chosen, folder, folder)
    bench.status = {"nothing": "ok"}
    bench.teams = {"nothing": object()}
    sizes = {"Rss": 1, "Pss": 1}
    bench.memory = {"nothing": {"plain": sizes, "checkpoints": sizes}}
    bench.visits = {"nothing": []}
    bench.state_bytes = 4096
    return bench


def test_a_run_cut_short_and_resumed_has_the_figures_of_one_that_was_not(
    modules: argparse.Namespace, tmp_path: Path
) -> None:
    whole = bench_of(modules, tmp_path)
    whole.visits["nothing"] = [visit(1), visit(7)]
    whole.samples = {"copy": [1.0, 3.0]}

    first = bench_of(modules, tmp_path)
    first.visits["nothing"], first.samples, first.rounds = [visit(1)], {"copy": [1.0]}, 1
    path = tmp_path / "run.json"
    modules.record.write(path, about(), first.result(), first.partial())
    second = bench_of(modules, tmp_path)
    facts, partial = modules.record.take_up(path, about(date="2026-01-02"))
    second.take_up(partial)
    assert second.rounds == 1
    second.visits["nothing"].append(visit(7))
    second.samples["copy"].append(3.0)

    assert second.result() == whole.result()
    assert second.result() != first.result()
    assert facts["date"] == "2026-01-01"
    assert facts["resumed"] == ["2026-01-02"]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"commit": "2" * 40}, "commit"),
        ({"changes": "abc"}, "changes"),
        ({"cpu": "another core"}, "cpu"),
        ({"torch": "2.14"}, "torch"),
        ({"settings": {"model": "toy", "rounds": 5}}, "--rounds: 3 there, 5 here"),
        ({"settings": {"model": "linear", "rounds": 3}}, "--model: toy there, linear here"),
    ],
)
def test_another_measurement_is_not_taken_up(
    modules: argparse.Namespace, tmp_path: Path, changed: dict[str, Any], named: str
) -> None:
    bench, path = bench_of(modules, tmp_path), tmp_path / "run.json"
    modules.record.write(path, about(), bench.result(), bench.partial())
    modules.record.take_up(path, about())
    with pytest.raises(modules.record.CannotResumeError, match=named) as caught:
        modules.record.take_up(path, about(**changed))
    assert str(caught.value).count(" there, ") == 1


def test_a_complete_file_or_none_of_ours_is_not_taken_up(
    modules: argparse.Namespace, tmp_path: Path
) -> None:
    bench, path = bench_of(modules, tmp_path), tmp_path / "run.json"
    modules.record.write(path, about(), bench.result())
    with pytest.raises(modules.record.CannotResumeError, match="nothing is missing"):
        modules.record.take_up(path, about())
    for text in ("", "[]", '{"partial": {}}'):
        path.write_text(text)
        with pytest.raises(modules.record.CannotResumeError, match="no results of an interrupt"):
            modules.record.take_up(path, about())
    with pytest.raises(modules.record.CannotResumeError, match="no results of an interrupt"):
        modules.record.take_up(tmp_path / "absent", about())


def test_a_write_that_fails_leaves_the_file_before_it(
    modules: argparse.Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, path = bench_of(modules, tmp_path), tmp_path / "run.json"
    modules.record.write(path, about(), bench.result(), bench.partial())
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(modules.files.os, "fsync", full)
    bench.rounds = 1
    with pytest.raises(OSError, match="no space"):
        modules.record.write(path, about(), bench.result(), bench.partial())
    assert path.read_bytes() == before
    assert json.loads(before)["partial"]["rounds"] == 0


def test_remaining_figures_come_from_the_newest_record_of_each_part(
    modules: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 10.0, 10.0, 40.0, 40.0, 52.0])
    monkeypatch.setattr(modules.time_left.time, "perf_counter", lambda: next(clock))
    pace = modules.time_left.Pace(["a", "b", "c"] * 2)
    assert pace.left_seconds() is None
    with pace.part("a"):
        pass
    assert pace.left_seconds() == 5 * 10
    with pace.part("b"):
        pass
    assert pace.left_seconds() == 10 + 30 + 2 * 20
    pace.drop("c")
    assert pace.left_seconds() == 10 + 30
    with pace.part("a"):
        pass
    assert pace.left_seconds() == 30
    assert pace.text() == "about 30 s to go"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--methods ours-off,ours-memory", "add that to --methods"),
        ("--methods hvd-commit", "unknown methods hvd-commit"),
        ("--launcher horovod --device cuda", "on the CPU"),
        ("--steps 6", "multiple of --every"),
    ],
)
def test_options_that_cannot_be_run_are_refused_with_the_way_out(
    modules: argparse.Namespace, line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        modules.options.arguments(line.split(), "")
    assert said in capsys.readouterr().err


def test_settings_are_the_measured_job_and_not_the_place_of_its_files(
    modules: argparse.Namespace, tmp_path: Path
) -> None:
    def settings(line: str) -> dict[str, Any]:
        found: dict[str, Any] = modules.options.settings(
            modules.options.arguments(line.split(), "")
        )
        return found

    plain = settings("--toy")
    assert json.loads(json.dumps(plain)) == plain
    assert settings("--toy --json a.json --plot b.png --resume c.json --timeout 9") == plain
    assert settings("--toy --rounds 3") != plain
    assert settings(f"--toy --dir {tmp_path}") != plain
