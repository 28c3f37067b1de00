"""The log history of a Trainer as text, with its times apart."""

from __future__ import annotations

import json

import torch

from tierckpt.interchange import entries_of, lines_of


def test_entries_come_back_in_their_order_and_times_are_apart() -> None:
    entries = [
        {"loss": 0.5, "epoch": 0.1, "step": 1},
        {"eval_loss": 0.25, "eval_runtime": 1.5, "eval_samples_per_second": 8.0, "step": 1},
    ]
    history, times = lines_of(entries)
    assert json.dumps(entries_of(history, times)) == json.dumps(entries)
    slower = [entries[0], {**entries[1], "eval_runtime": 3.0, "eval_samples_per_second": 4.0}]
    assert lines_of(slower)[0] == history
    assert lines_of(slower)[1] != times


def test_numbers_of_torch_become_plain() -> None:
    assert entries_of(*lines_of([{"loss": torch.tensor(0.5)}])) == [{"loss": 0.5}]
