"""Names and places of folders: wrong ones are refused at load, with the setting's name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tierckpt.config import DEFAULT_ID_BYTES, FOLDERS, NAME_BYTES, load_config
from tierckpt.errors import ConfigError
from tierckpt.storage import JobDirectory, job_id_of

NO_UTF8 = os.fsdecode(b"/tmp/\xff")


@pytest.mark.parametrize("setting", ["job_id", "node"])
@pytest.mark.parametrize("value", ["../zz", "a/b", "/", ".", "..", "a\0b"])
def test_a_name_that_leads_elsewhere_is_refused(setting: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"^{setting} is "):
        load_config({setting: value}, {})


@pytest.mark.parametrize("setting", ["job_id", "node"])
def test_a_too_long_one_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=f"{setting} is too long .300 letters.*limit is 255"):
        load_config({setting: "x" * 300}, {})
    with pytest.raises(ConfigError, match=f"{setting} is too long .200 letters.*limit is 255"):
        load_config({"job_id": "y", "node": "y", setting: "é" * 200}, {})


@pytest.mark.parametrize(
    "names",
    [
        {"job_id": "x" * (NAME_BYTES - 1)},
        {"node": "x" * (NAME_BYTES - 1 - DEFAULT_ID_BYTES)},
        {"job_id": "é" * 60, "node": "x" * (NAME_BYTES - 1 - 120)},
        {"job_id": "a b:c@d..e", "node": "rack-1.example"},
    ],
)
def test_all_others_make_a_folder(names: dict[str, str], tmp_path: Path) -> None:
    config = load_config({**names, "shm_dir": tmp_path, "path": "x" * 99}, {})
    JobDirectory.at(tmp_path, config.job_id or job_id_of(config.path), config.node).create()


def test_the_longest_default_is_known() -> None:
    assert len(job_id_of("/tmp/" + "x" * 99)) == DEFAULT_ID_BYTES


@pytest.mark.parametrize(
    "setting", ["path", "shm_dir", "events_dir", "trace_dir", "persistent_path", "job_id", "node"]
)
def test_text_not_in_utf8_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=f"^{setting} is .*not UTF-8"):
        load_config({setting: NO_UTF8.removeprefix("/tmp/")}, {})


@pytest.mark.parametrize("setting", [*FOLDERS, "persistent_path"])
def test_a_tilde_is_the_home_directory(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))

    def found(given: str) -> str:
        config = load_config({}, {f"TIERCKPT_{setting.upper()}": given})
        return config.persistent.path if "_path" in setting else getattr(config, setting)

    assert found("~/ckpts") == str(tmp_path / "ckpts")
    assert found("/data/~/ckpts") == "/data/~/ckpts"


def test_a_path_that_leads_to_no_utf8_has_a_job_id(tmp_path: Path) -> None:
    target = os.fsencode(tmp_path) + b"/\xff"
    os.mkdir(target)
    os.symlink(target, tmp_path / "link")
    assert job_id_of(tmp_path / "link") == job_id_of(os.fsdecode(target))


@pytest.mark.parametrize(
    "given", [{"arguments": {"shm_dir": ""}}, {"environment": {"TIERCKPT_SHM_DIR": ""}}]
)
def test_no_place_for_slots_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="shm_dir is empty"):
        load_config(**{"environment": {}, **given})


@pytest.mark.parametrize("setting", ["path", "shm_dir", "persistent_path"])
def test_a_file_url_is_the_directory_that_it_names(setting: str) -> None:
    """A folder called `file:` would be made in the working directory, where it is not looked
    for."""
    given = load_config({setting: "file:///shared/run 7"}, {})
    assert given == load_config({setting: "/shared/run 7"}, {})


@pytest.mark.parametrize("setting", FOLDERS)
def test_a_url_is_no_directory(setting: str) -> None:
    with pytest.raises(ConfigError, match=f"^{setting} is 's3://bucket/run7'.*persistent_path"):
        load_config({setting: "s3://bucket/run7"}, {})


@pytest.mark.parametrize("shared", ["ckpts", "./x/../ckpts", "ckpts/"])
def test_two_levels_have_two_places(shared: str) -> None:
    with pytest.raises(ConfigError, match="path and persistent_path are both"):
        load_config({"path": "ckpts", "persistent_path": shared}, {})
    load_config({"path": "ckpts", "persistent_path": "ckpts/shared"}, {})


def test_the_shared_place_is_one_for_all_nodes() -> None:
    with pytest.raises(ConfigError, match=r"persistent_path is .*/\{node\}'.*all nodes"):
        load_config({"persistent_path": "/shared/{node}"}, {})


def test_the_file_of_settings_may_be_at_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "settings.toml").write_text("slots = 3")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_config({}, {"TIERCKPT_CONFIG": "~/settings.toml"}).slots == 3
