"""TensorBoard: its own accumulator reads the files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.exported_job import EVENTS, FIRST, JOB, play
from tierckpt.events import Event
from tierckpt.exporters import TensorBoard

pytest.importorskip("tensorboard")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

CURVES = {
    "tierckpt/restore_seconds/inventory": [(7, 0.1)],
    "tierckpt/restore_seconds/total": [(7, 0.25)],
    "tierckpt/stall_seconds": [(9, 0.3)],  # the largest
    "tierckpt/store_seconds/memory": [(9, 0.05)],
    "tierckpt/store_seconds/local": [(8, 0.75)],
    "tierckpt/version_bytes/memory": [(9, 100.0)],
    "tierckpt/version_bytes/local": [(8, 90.0)],
    "tierckpt/skipped/local/busy": [(9, 1.0)],
    "tierckpt/failed/local": [(10, 1.0)],
    "tierckpt/drifted": [(10, 1.0)],
}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierckpt.exporters.exporter.Exporter.turn_seconds", 0.01)


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {
        tag: [(point.step, pytest.approx(point.value)) for point in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


def test_its_own_reader_finds_the_curves(tmp_path: Path) -> None:
    play(TensorBoard(tmp_path / "runs"), FIRST)
    assert curves(tmp_path / "runs") == CURVES


def test_only_the_first_rank_of_the_job_writes(tmp_path: Path) -> None:
    play(TensorBoard(tmp_path / "runs"), JOB)
    assert not (tmp_path / "runs").exists()


def test_the_writer_of_the_script_gets_the_curves_and_stays_open(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    play(TensorBoard(writer), FIRST)
    writer.add_scalar("loss", 2.0, 11)
    writer.close()
    assert curves(tmp_path) == {**CURVES, "loss": [(11, 2.0)]}


def sealed(version: int, stall_seconds: float) -> Event:
    seconds = {"stall": stall_seconds, "sealed_after": 0.1}
    return Event("sealed", "memory", version, nbytes=1, seconds=seconds)


def test_after_a_restart_the_lost_versions_are_hidden(tmp_path: Path) -> None:
    """TensorBoard would show the steps that are made again twice."""
    for version in (7, 8, 9):  # the job dies after 9
        play(TensorBoard(tmp_path), FIRST, (sealed(version, 1.0),))
    play(TensorBoard(tmp_path), FIRST, (Event("restored", "local", 7), sealed(8, 2.0)))
    assert curves(tmp_path)["tierckpt/stall_seconds"] == [(7, 1.0), (8, 2.0)]
    assert all(name.endswith(".tierckpt") for name in os.listdir(tmp_path))


def test_a_curve_has_a_point_at_every_export(tmp_path: Path) -> None:
    exporter = TensorBoard(tmp_path, every_seconds=0)
    exporter.on_attached(FIRST)
    for event in EVENTS:
        exporter.on_event(event)
    exporter.on_closed()
    assert curves(tmp_path) == CURVES
