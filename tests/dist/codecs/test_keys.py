"""Keys of encrypted levels: equal on all ranks, or no rank starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tierckpt
from tests.support.training import Place, attach, make_job, train
from tierckpt.codecs import KEY_VARIABLE, key_fingerprint

KEY, OTHER = "5e" * 32, "a7" * 32
ENCRYPTED = {"local_codecs": "aes-gcm", "local_every_steps": 1}


def key_id(key: str) -> str:
    return key_fingerprint(bytes.fromhex(key))


def refused(place: Place) -> str:
    with pytest.raises(tierckpt.ConfigError) as caught:
        attach(make_job(), place, **ENCRYPTED)
    return str(caught.value)


def test_another_key_on_one_rank_is_an_error_on_all(
    own_ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place = Place.under(tmp_path, shm_dir)
    for text in own_ranks([{KEY_VARIABLE: KEY}, {KEY_VARIABLE: OTHER}]).run(refused, place):
        assert text.startswith("rank 1 and rank 0 have different settings")
        assert f"aes-gcm key_id={key_id(OTHER)} there" in text
        assert f"aes-gcm key_id={key_id(KEY)} on rank 0" in text
        assert KEY not in text
        assert OTHER not in text


def train_and_close(place: Place) -> None:
    job = make_job()
    attached = attach(job, place, **ENCRYPTED)
    train(job, attached.ckpt, range(3))
    attached.ckpt.close()


def cannot_come_back(place: Place) -> str:
    """This run's settings name no codec, so no key was requested at its start."""
    attached = attach(make_job(), place)
    with pytest.raises(tierckpt.RestoreError) as caught:
        attached.ckpt.restore()
    attached.ckpt.abandon()
    return str(caught.value)


def test_a_key_that_one_rank_lacks_at_a_restore_ends_it_on_all(
    own_ranks: Any, tmp_path: Path, shm_dir: Path
) -> None:
    place = Place.under(tmp_path, shm_dir)
    own_ranks([{KEY_VARIABLE: KEY}] * 2).run(train_and_close, place)
    for text in own_ranks([{KEY_VARIABLE: KEY}, {KEY_VARIABLE: ""}]).run(cannot_come_back, place):
        assert "v3 exists and cannot be decoded" in text
        assert f"encrypted with the key whose id is {key_id(KEY)}, and no key is given" in text
        assert "as rank 1 found" in text
