"""Settings: their sources, their precedence, and the errors of wrong ones."""

from __future__ import annotations

import json
import math
import os
import re
import traceback
from pathlib import Path
from typing import Any

import pytest

from tierckpt.config import (
    KEEP,
    NOT_SETTINGS,
    STORAGE_OPTIONS,
    TABLES,
    YEAR_SECONDS,
    Config,
    RetentionPolicy,
    known_settings,
    load_config,
)
from tierckpt.errors import ConfigError

NAME = {str: "text", int: 7, float: 2.5, bool: True}
"""A valid value of each type, for settings that take any."""
CHOICES = {
    "replicas": "stop every 7",
    "data_witness": "warn",
    "when_busy": "wait",
    "release": "forward",
    "boundary": "explicit",
    "agent": "inline",
    "halt_signals": "SIGHUP",
    "halt_notices": "gcp http://127.0.0.1:1",
    "local_keep": "3, every 9, best 2",
    "persistent_keep": "5",
    "export": "tensorboard runs",
    "stages": "mirror /disk2",
    "overhead_budget": 0.25,
    "peer_redundancy": "xor",
    "local_codecs": "zstd",
    "persistent_codecs": "zstd",
}


NO_RULES = ("", "two", "2, 3", "2.5", "every", "2, best 0", "best 2 cheapest", "2 every 5", "2,")
"""Texts that say nothing about what a level keeps."""
WAITS = (
    "agent_linger_seconds",
    "halt_grace_seconds",
    "halt_seconds_left",
)
"""Settings that something waits for, in seconds, and not for more than a year."""


def value_for(setting: str, kind: type) -> Any:
    return CHOICES.get(setting, NAME[kind])


def read(config: Config, setting: str) -> Any:
    table, _, rest = setting.partition("_")
    return getattr(getattr(config, table), rest) if table in TABLES else getattr(config, setting)


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "tierckpt.toml"
    path.write_text(text)
    return path


def test_every_setting_can_come_from_every_source(tmp_path: Path) -> None:
    for setting, kind in known_settings().items():
        if setting == STORAGE_OPTIONS:
            continue  # which has forms of its own, see below
        value = value_for(setting, kind)
        text = f"{setting} = {value!r}\n".replace("'", '"').replace("True", "true")
        for config in (
            load_config({setting: value}, {}),
            load_config({}, {f"TIERCKPT_{setting.upper()}": str(value)}),
            load_config({}, {}, toml(tmp_path, text)),
        ):
            expected = os.path.abspath(value) if setting.endswith(("path", "shm_dir")) else value
            assert read(config, setting) == expected
            assert type(read(config, setting)) is kind


def test_arguments_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = toml(tmp_path, "slots = 3\nlocal_keep = 3\nmemory_every_steps = 3\n")
    environment = {"TIERCKPT_SLOTS": "4", "TIERCKPT_LOCAL_KEEP": "4"}
    config = load_config({"slots": 5}, environment, file)
    assert (config.slots, config.local.keep, config.memory.every_steps) == (5, "4", 3)


def test_an_argument_of_none_is_no_argument() -> None:
    assert load_config({"slots": None}, {"TIERCKPT_SLOTS": "4"}).slots == 4


def test_tables_in_the_file_are_the_same_settings(tmp_path: Path) -> None:
    file = toml(tmp_path, "slots = 4\n[local]\nevery_steps = 9\n[memory]\nevery_seconds = 1\n")
    config = load_config({}, {}, file)
    assert (config.slots, config.local.every_steps, config.memory.every_seconds) == (4, 9, 1.0)


def test_the_environment_may_name_the_file(tmp_path: Path) -> None:
    file = toml(tmp_path, "slots = 4\n")
    assert load_config({}, {"TIERCKPT_CONFIG": str(file)}).slots == 4
    other = tmp_path / "other.toml"
    other.write_text("slots = 6\n")
    assert load_config({}, {"TIERCKPT_CONFIG": str(file)}, other).slots == 6


def test_variables_that_are_not_settings_are_let_be() -> None:
    environment = {f"TIERCKPT_{name}": "" for name in NOT_SETTINGS} | {"PATH": "/bin"}
    assert load_config({}, environment) == load_config({}, {})


@pytest.mark.parametrize("wrong", ["TIERCHKPT_PATH", "TIERCKP_PATH", "tierckpt_path"])
def test_a_variable_with_a_misspelt_prefix_does_not_pass_in_silence(wrong: str) -> None:
    with pytest.raises(ConfigError, match=rf"{wrong} has no effect: did you mean TIERCKPT_PATH\?"):
        load_config({}, {wrong: "/x"})
    assert load_config({}, {"FRONTIER_PATH": "/x", "TIER_PATH": "/x"}) == load_config({}, {})


@pytest.mark.parametrize(
    ("wrong", "suggestion"),
    [
        ("local_every_step", "local_every_steps"),
        ("localeverysteps", "local_every_steps"),
        ("slot", "slots"),
        ("when_buzy", "when_busy"),
    ],
)
def test_an_unknown_setting_is_answered_with_the_nearest(
    wrong: str, suggestion: str, tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError, match=f"'{wrong}' in the arguments; did you mean '{suggestion}'"
    ):
        load_config({wrong: 1}, {})
    variable = f"TIERCKPT_{wrong.upper()}"
    with pytest.raises(ConfigError, match=f"variable {variable}; did you mean '{suggestion}'"):
        load_config({}, {variable: "1"})
    with pytest.raises(ConfigError, match=rf"tierckpt\.toml; did you mean '{suggestion}'"):
        load_config({}, {}, toml(tmp_path, f"{wrong} = 1\n"))


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("extras", "extra"),
        ("extra_per_ranks", "extra_per_rank"),
        ("on_events", "on_event"),
        ("confg_file", "config_file"),
        ("comm_hok", "comm_hook"),
    ],
)
def test_a_mistyped_argument_but_no_setting_has_a_nearest_one_too(wrong: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{meant}'"):
        load_config({wrong: 1}, {})
    with pytest.raises(ConfigError) as caught:
        load_config({}, {f"TIERCKPT_{wrong.upper()}": "1"})
    assert f"'{meant}'" not in str(caught.value), "it cannot be set there"


def test_a_setting_without_its_level_is_answered_with_all_levels_that_have_it() -> None:
    meant = "did you mean 'local_keep' or 'persistent_keep'?"
    with pytest.raises(ConfigError, match=re.escape(meant)):
        load_config({"keep": 1}, {})


def test_an_unknown_setting_leads_to_the_page_and_not_to_seventy_names() -> None:
    with pytest.raises(ConfigError, match=r"'zzz' in the arguments; docs/settings\.md") as caught:
        load_config({"zzz": 1}, {})
    assert len(str(caught.value)) < 160
    page = Path(__file__).parents[3] / "docs" / "settings.md"
    text = page.read_text()
    missing = [name for name in known_settings() if f"`{name}`" not in text]
    assert not missing, "the page lists all"


def test_a_right_default_makes_a_setting_unnecessary() -> None:
    assert len(known_settings()) <= 42, "drop another one, or find the default that is right"


@pytest.mark.parametrize("table", ["locl", "tierckpt"])
def test_an_unknown_table_is_refused(table: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"unknown table \[{table}\].*at the top level"):
        load_config({}, {}, toml(tmp_path, f"[{table}]\nevery_steps = 3\n"))


def test_a_setting_of_no_level_below_a_table_is_answered_with_its_place(tmp_path: Path) -> None:
    """Whatever follows a table's head belongs to the table."""
    advice = "path is in the table [local] of the file .*: put it at the top of the file"
    with pytest.raises(ConfigError, match=advice.replace("[", r"\[")):
        load_config({}, {}, toml(tmp_path, '[local]\nevery_steps = 3\npath = "/run7"\n'))
    file = toml(tmp_path, 'path = "/run7"\n[local]\nevery_steps = 3\n')
    assert load_config({}, {}, file).path == "/run7"


@pytest.mark.parametrize("order", [1, -1])
def test_one_setting_given_twice_in_a_file_is_refused(order: int, tmp_path: Path) -> None:
    lines = ["local.every_steps = 10\n", "local_every_steps = 20\n"]
    with pytest.raises(ConfigError, match="local_every_steps is given twice in the file"):
        load_config({}, {}, toml(tmp_path, "".join(lines[::order])))


@pytest.mark.parametrize(
    ("setting", "values", "must"),
    [
        ("slots", (2.0, "two", "2.5", True, [2]), "a whole number"),
        ("path", (3,), "a text"),
        ("when_busy", (1,), "a text"),
        ("local_every_seconds", ("auto", "5m", False, {"a": 1}), "a number of seconds"),
        ("local_every_steps", ("often",), "a whole number of steps or auto"),
        ("persistent_bytes_per_second", ("1G",), "a number of bytes"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_name_with_the_unit(
    setting: str, values: tuple[Any, ...], must: str
) -> None:
    for value in values:
        said = f"{setting} in the arguments is {value!r}; it must be {must}"
        with pytest.raises(ConfigError, match=f"{re.escape(said)}$"):
            load_config({setting: value}, {})


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("slots", 1),
        *((name, value) for name in KEEP for value in (0, -1, *NO_RULES)),
        ("local_every_steps", -1),
        ("local_every_seconds", -0.5),
        ("local_every_seconds", float("nan")),
        ("memory_every_steps", -1),
        ("memory_every_seconds", -1.0),
        ("when_busy", "panic"),
        ("release", "later"),
        ("boundary", "auto"),
        ("path", ""),
        *(
            ("replicas", text)
            for text in ("stop every", "warn every 0", "off every 5", "every 5", "5")
        ),
        ("overhead_budget", 0.0),
        ("overhead_budget", 1.0),
        ("overhead_budget", 3),
        ("overhead_budget", math.nan),
        ("peer_redundancy", "xor of 1"),
        ("peer_redundancy", "xor of -3"),
        ("peer_redundancy", "rs 4+2 of 8"),
        ("peer_interface", "eth0:65536"),
        ("peer_interface", "eth0:-1"),
        ("peer_interface", "[fd00::5"),
        *((name, value) for name in WAITS for value in (-1.0, math.inf, math.nan, 4e7)),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=setting):
        load_config({setting: value}, {})


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        (3, RetentionPolicy(3)),
        ("3", RetentionPolicy(3)),
        ("every 1000", RetentionPolicy(2, 1000)),
        ("best  2 ,1", RetentionPolicy(1, 0, 2)),
        ("2, every 10, best 3 lowest", RetentionPolicy(2, 10, 3)),
        ("best 3 highest", RetentionPolicy(2, 0, 3, best_is_low=False)),
    ],
)
def test_what_a_level_keeps_is_one_text(text: str | int, policy: RetentionPolicy) -> None:
    config = load_config(dict.fromkeys(KEEP, text), {})
    assert config.local.retention == config.persistent.retention == policy
    assert config.best == ("lowest" if policy.best_is_low else "highest")


def test_ranks_that_say_the_same_in_other_words_have_the_same_setting() -> None:
    one, other = (load_config({"local_keep": text}, {}) for text in (" 3,  every 9 ", "3, every 9"))
    assert one.local.keep == other.local.keep


@pytest.mark.parametrize("wrong", [True, 2.0, ["2"]])
def test_neither_a_number_nor_a_text_is_answered_with_both(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="it must be a number or a text"):
        load_config({"persistent_keep": wrong}, {})


def test_the_levels_agree_which_metric_is_the_best() -> None:
    low, high = "2, best 3", "2, best 3 highest"
    with pytest.raises(ConfigError, match="the lowest metric is the best, as without a word, or"):
        load_config({"local_keep": low, "persistent_keep": high}, {})
    assert load_config({"local_keep": high}, {}).best == "highest"
    assert load_config({"local_keep": "2", "persistent_keep": high}, {}).best == "highest"
    assert load_config({"local_keep": low, "persistent_keep": low}, {}).best == "lowest"


@pytest.mark.parametrize("name", ["on_drift", "best", "trace_steps", "local_in_place"])
def test_a_name_unlike_all_others_is_not_answered_with_one(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config({name: 1}, {})
    assert "did you mean" not in str(error.value)


def test_a_wrong_text_is_answered_with_right_ones() -> None:
    said = 'local_keep is \'2, every\'; give .*: "2", "2, every 1000", "2, best 3"'
    with pytest.raises(ConfigError, match=said):
        load_config({"local_keep": "2, every"}, {})


@pytest.mark.parametrize("old", ["last", "every", "best"])
def test_a_part_of_it_by_a_name_of_its_own_is_answered_with_the_setting(old: str) -> None:
    with pytest.raises(ConfigError, match="did you mean 'local_keep'"):
        load_config({f"local_keep_{old}": 1}, {})


@pytest.mark.parametrize(
    ("text", "steps", "stops"),
    [("warn", 50, False), ("stop", 50, True), ("off", 0, False), (" stop  every 7", 7, True)],
)
def test_replicas_says_how_often_and_what_follows(text: str, steps: int, stops: bool) -> None:
    config = load_config({"replicas": text}, {})
    assert (config.compared_steps, config.stops_on_drift) == (steps, stops)


def test_never_is_a_value(tmp_path: Path) -> None:
    never = ("memory_every_seconds", "local_every_seconds", "persistent_every_seconds")
    load_config(dict.fromkeys(never, math.inf), {})
    load_config(dict.fromkeys(WAITS, float(YEAR_SECONDS)), {})


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml"):
        load_config({}, {}, tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match=r"tierckpt\.toml"):
        load_config({}, {}, toml(tmp_path, "slots = = 3"))
    (tmp_path / "latin.toml").write_bytes(b"\xff\xfepath = 'x'")
    with pytest.raises(ConfigError, match=r"latin\.toml: .*utf-8"):
        load_config({}, {}, tmp_path / "latin.toml")


# --- combinations that make no sense -------------------------------------------------------------


def test_parity_of_nothing_is_refused() -> None:
    never = {"local_every_steps": 0, "local_every_seconds": 0}
    with pytest.raises(ConfigError, match=r"peer_redundancy is 'xor'.*set local_every_steps"):
        load_config({**never, "peer_redundancy": "xor"}, {})
    load_config({**never, "peer_redundancy": "none"}, {})
    with pytest.raises(ConfigError, match=r"peer_redundancy: the redundancy 'rs 4' is unknown"):
        load_config({"peer_redundancy": "rs 4"}, {})
    load_config({**never, "peer_redundancy": "xor", "persistent_path": "shared"}, {})


def test_settings_of_a_missing_level_are_named() -> None:
    given = {"persistent_every_steps": 5, "persistent_codecs": "zstd"}
    assert load_config(given, {}).idle == list(given)
    assert load_config({**given, "persistent_path": "shared"}, {}).idle == []
    assert load_config({}, {}).idle == []


# --- storage options -----------------------------------------------------------------------------

OPTIONS = {"key": "open", "secret": "sesame", "client_kwargs": {"region_name": "nowhere"}}


def test_storage_options_are_a_table_a_mapping_or_json(tmp_path: Path) -> None:
    file = toml(
        tmp_path,
        "[persistent.storage_options]\nkey = 'open'\nsecret = 'sesame'\n"
        "client_kwargs = { region_name = 'nowhere' }\n",
    )
    for config in (
        load_config({}, {}, file),
        load_config({STORAGE_OPTIONS: OPTIONS}, {}),
        load_config({STORAGE_OPTIONS: json.dumps(OPTIONS)}, {}),
        load_config({}, {f"TIERCKPT_{STORAGE_OPTIONS.upper()}": json.dumps(OPTIONS)}),
    ):
        assert config.persistent.options() == OPTIONS
        assert "sesame" not in repr(config)
    assert load_config({}, {}).persistent.options() == {}
    assert load_config({STORAGE_OPTIONS: {}}, {}) == load_config({}, {})


@pytest.mark.parametrize(
    "wrong", ["sesame", '{"secret": "sesame"', '["sesame"]', {"a": {"sesame"}}]
)
def test_wrong_storage_options_are_refused_and_not_repeated(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=f"{STORAGE_OPTIONS} in the arguments must") as refused:
        load_config({STORAGE_OPTIONS: wrong}, {})
    assert "sesame" not in "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize("option", ["direct", "shared_writes"])
@pytest.mark.parametrize("path", ["/shared", "file:///shared"])
def test_an_option_of_a_directory_must_be_true_or_false(option: str, path: str) -> None:
    for wrong in ("maybe", "true", 1, None):
        with pytest.raises(ConfigError, match=f"{option} in {STORAGE_OPTIONS} must be true"):
            load_config({"persistent_path": path, STORAGE_OPTIONS: {option: wrong}}, {})
    given = {option: False}
    found = load_config({"persistent_path": path, STORAGE_OPTIONS: given}, {})
    assert found.persistent.options() == given
    load_config({"persistent_path": "own://place", STORAGE_OPTIONS: {option: "its own"}}, {})


@pytest.mark.parametrize(
    ("given", "device", "port"),
    [
        ("", "", 0),
        ("ib0", "ib0", 0),
        ("ib0:29400", "ib0", 29400),
        (" :29400 ", "", 29400),
        ("10.0.0.5:29400", "10.0.0.5", 29400),
        ("fd00::5", "fd00::5", 0),
        ("[fd00::5]", "fd00::5", 0),
        ("[fd00::5]:65535", "fd00::5", 65535),
    ],
)
def test_an_interface_may_have_a_port(given: str, device: str, port: int) -> None:
    peer = load_config({"peer_interface": given}, {}).peer
    assert (peer.device, peer.port) == (device, port)
