"""SCR's settings by name."""

from __future__ import annotations

import re

import pytest

from tierckpt.errors import ConfigError
from tierckpt.files.scr_session import REFUSED, ScrSettings, merged, of_file, scr_settings


def settings(given: dict[str, str], environment: dict[str, str], nodes: int) -> ScrSettings:
    return scr_settings(merged(given, {}, environment), nodes)


def test_the_users_file_wins_over_config_and_variables_over_both() -> None:
    text = """
    # my job
    SCR_FLUSH=20    # every 20th
    SCR_CACHE_BASE="/ssd/$JOB"
    SCR_CHECKPOINT_INTERVAL = 7
    CKPT=0 INTERVAL=1 TYPE=XOR
    """
    found = of_file(text, {"JOB": "77"})
    assert found == {
        "SCR_FLUSH": "20",
        "SCR_CACHE_BASE": "/ssd/77",
        "SCR_CHECKPOINT_INTERVAL": "7",
    }
    given = {"SCR_FLUSH": "1", "SCR_CACHE_SIZE": "3"}
    every = merged(given, found, {"SCR_CHECKPOINT_INTERVAL": "9", "PATH": "/bin"})
    numbers = [every[f"SCR_{name}"] for name in ("FLUSH", "CACHE_SIZE", "CHECKPOINT_INTERVAL")]
    assert numbers == ["20", "3", "9"]
    assert "PATH" not in every


def test_variables_win_and_defaults_are_those_of_scr() -> None:
    found = settings({"SCR_CHECKPOINT_INTERVAL": "5"}, {"SCR_CHECKPOINT_INTERVAL": "3"}, 4)
    assert (found.interval, found.seconds, found.overhead) == (3, 0, 0)
    assert found.advises
    assert not settings({}, {}, 4).advises
    of = found.of_files
    assert of["peer_redundancy"] == "xor of 4"
    assert (of["local_keep"], of["persistent_every_steps"]) == (1, 10)
    assert of["path"].startswith("/dev/shm/")


@pytest.mark.parametrize(
    ("given", "nodes", "redundancy"),
    [
        ({"SCR_COPY_TYPE": "RS"}, 8, "rs 6+2"),
        ({"SCR_COPY_TYPE": "rs", "SCR_SET_SIZE": "4", "SCR_SET_FAILURES": "1"}, 3, "rs 2+1"),
        ({"SCR_COPY_TYPE": "RS"}, 2, "none"),
        ({"SCR_COPY_TYPE": "PARTNER"}, 2, "partner of 2"),
        ({}, 1, "none"),
        ({"SCR_COPY_TYPE": "SINGLE"}, 8, "none"),
    ],
)
def test_redundancy_fits_the_nodes(given: dict[str, str], nodes: int, redundancy: str) -> None:
    found = settings(given, {}, nodes)
    assert found.of_files["peer_redundancy"] == redundancy
    lost = redundancy == "none" and given.get("SCR_COPY_TYPE") != "SINGLE"
    assert bool(found.notices) == lost


def test_settings_without_effect_are_named_a_misspelt_one_with_the_nearest() -> None:
    given = {"SCR_FLSUH": "1", "SCR_FOO": "1", "SCR_CRC_ON_COPY": "1", "SCR_DEBUG": "1"}
    quiet = {"SCR_COPY_TYPE": "SINGLE", "SCR_CONF_FILE": "f", "SCR_CURRENT": ""}
    assert settings(given | quiet, {}, 1).notices == (
        "SCR_FLSUH is no setting of SCR, and has no effect; did you mean SCR_FLUSH?",
        "SCR_FOO is no setting of SCR, and has no effect",
        "SCR_CRC_ON_COPY, SCR_DEBUG have no effect in tierckpt.scr (docs/files.md)",
    )
    assert settings(quiet, {}, 1).notices == ()


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_values_without_a_counterpart_are_refused(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(REFUSED[name, value][:20])):
        settings({name: value}, {}, 1)


@pytest.mark.parametrize("value", ["-1", "x", "inf"])
def test_wrong_numbers_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"SCR_FLUSH is '.*'; it must be a number, 0 or more"):
        settings({"SCR_FLUSH": value}, {}, 1)
