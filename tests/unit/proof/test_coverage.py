"""The behaviour that `tierckpt prove` did not test: from records, and from passes over loaders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from tierckpt.proof import (
    RankRun,
    Request,
    Writer,
    coverage_gaps,
    over_epochs,
    read_records,
    recorder,
)

ASKED = Request(start=0, kill_after=5, steps=10)
SAME = {
    "model/w": "#1",
    "options/o[0]/lr": "float 0.1",
    "extra/schedule/last_epoch": "int 0",
    "extra/scaler/scale": "float 8",
    "extra/scaler/_growth_tracker": "int 0",
    "extra_per_rank": "dict",
}


def run_of(
    folder: Path, states: Sequence[dict[str, str]], seen: Sequence[list[list[int]]]
) -> RankRun:
    (folder / "records").mkdir(parents=True)
    writer = Writer(folder, "job", 0)
    writer.line("attached", rank=0, ranks=1, path="/c", place="/x", memory="/m")
    for version, (state, under_way) in enumerate(zip(states, seen, strict=True), 1):
        writer.state(version, {**SAME, "model/w": f"#{version}", **state})
        writer.line("passes", version=version, passes=under_way)
    writer.line("unsaved", texts=["StepLR ..."], schedulers=1)
    return read_records(folder)["job"].by_rank()[0]


def one_pass(versions: int, length: int = 100) -> list[list[list[int]]]:
    """A batch for each version."""
    return [[[1, length, version]] for version in range(1, versions + 1)]


def passes_of(length: int, versions: int) -> list[list[list[int]]]:
    """One after the other."""
    return [[[1 + v // length, length, 1 + v % length]] for v in range(versions)]


def test_unchanged_state_is_named(tmp_path: Path) -> None:
    run = run_of(tmp_path, [{}] * 9, one_pass(9))
    assert run.unsaved == ["StepLR ..."]
    epochs, rate, still = coverage_gaps(run, range(5, 10), ASKED)
    assert "no epoch ended in these steps" in epochs
    assert "no learning rate changed in these steps" in rate
    assert still == "not compared: extra/scaler, extra/schedule did not change in these steps"


def test_changed_state_is_not_named(tmp_path: Path) -> None:
    moves = [
        {
            "options/o[0]/lr": f"float {version}",
            "extra/schedule/last_epoch": f"int {version}",
            "extra/scaler/_growth_tracker": f"int {version}",
        }
        for version in range(9)
    ]
    run = run_of(tmp_path, moves, passes_of(3, 9))
    (text,) = coverage_gaps(run, range(5, 10), ASKED)
    assert "the scale of extra/scaler did not change, so no step was skipped" in text


@pytest.mark.parametrize(
    ("seen", "said", "how"),
    [
        (one_pass(9), "no epoch ended in these steps", "--kill-after 103 --steps 102"),
        (passes_of(7, 9), "no epoch ended before the kill", "--kill-after 10 --steps 10"),
        (passes_of(4, 5) + [[[2, 9, 2 + v]] for v in range(4)], "in these steps", "--steps 16, or"),
        (one_pass(9, 0), "no epoch ended in these steps", "more --kill-after and --steps"),
        ([[]] * 9, "as no DataLoader was in use", "--steps or --from"),
    ],
)
def test_epochs_that_did_not_end(
    seen: list[list[list[int]]], said: str, how: str, tmp_path: Path
) -> None:
    run = run_of(tmp_path, [{}] * 9, seen)
    text = coverage_gaps(run, range(6, 10), ASKED)[0]
    assert said in text
    assert how in text


@pytest.mark.parametrize(
    ("seen", "chosen"),
    [
        (one_pass(15), Request(0, 103, 102)),
        (passes_of(3, 15), Request(0, 6, 10)),
        (passes_of(4, 15), Request(0, 7, 10)),
        (passes_of(2, 15), ASKED),
        ([*passes_of(6, 12), *[[]] * 3], Request(0, 9, 10)),
        (one_pass(15, 0), None),
        ([[]] * 15, None),
    ],
)
def test_numbers_are_chosen_for_epochs_to_end(
    seen: list[list[list[int]]], chosen: Request | None, tmp_path: Path
) -> None:
    """The first end may be too close to the kill: the restored version is one or two steps
    older."""
    assert over_epochs(run_of(tmp_path, [{}] * 15, seen), ASKED) == chosen


def test_a_slow_loop_needs_more_steps(tmp_path: Path) -> None:
    """A loop with four batches per version ends its pass four times as early."""
    run = run_of(tmp_path, [{}] * 9, [[[1, 100, 4 * v]] for v in range(1, 10)])
    assert "--kill-after 28 --steps 27" in coverage_gaps(run, range(6, 10), ASKED)[0]


class Mine(DataLoader[torch.Tensor]):
    """A loader with its own `__iter__`."""

    def __iter__(self):  # type: ignore[no-untyped-def]
        return super().__iter__()


@pytest.mark.parametrize("kind", [DataLoader, Mine])
def test_passes_are_seen_while_they_are_under_way(
    kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in recorder.loader_kinds():  # is put back
        monkeypatch.setattr(each, "__iter__", vars(each)["__iter__"])
    monkeypatch.setattr(recorder, "_passes", [])
    recorder.watch_loaders()
    recorder.watch_loaders()
    loader = kind(list(range(6)), batch_size=2)
    training = iter(loader)
    next(training)
    assert list(loader), "an evaluation"
    ((number, *rest),) = recorder.loaders_under_way()
    assert rest == [3, 1]
    del training
    assert recorder.loaders_under_way() == []
    again = iter(loader)
    ((later, *rest),) = recorder.loaders_under_way()
    assert later > number
    assert rest == [3, 0]
    assert again


class Listed(DataLoader[int]):
    """Its iterator cannot be watched, and it has no length."""

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter([7])

    def __len__(self) -> int:
        raise NotImplementedError


def test_a_loader_that_cannot_be_watched_is_let_be(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in recorder.loader_kinds():
        monkeypatch.setattr(each, "__iter__", vars(each)["__iter__"])
    monkeypatch.setattr(recorder, "_passes", [])
    recorder.watch_loaders()
    assert list(iter(Listed([1]))) == [7]
    assert recorder.loaders_under_way() == []
