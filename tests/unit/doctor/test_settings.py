"""Variables and settings, as a job that starts with them sees them; agents of running jobs."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

import tierckpt
from tests.support.metadata_server import Aws, serving
from tests.support.warm_python.servers import PYTHON
from tierckpt.config import load_config
from tierckpt.doctor import Finding, Mark, Subject, software
from tierckpt.errors import ConfigError
from tierckpt.events import EventLog


def subject(**environment: str) -> Subject:
    return Subject(environment=environment)


def crosses(found: list[Finding]) -> list[Finding]:
    return [each for each in found if each.mark is Mark.CROSS]


def test_an_unknown_variable_is_named_with_the_nearest_one() -> None:
    given = {"TIERCKPT_PERSISTANT_PATH": "/x", "TIERCKPT_PATH": "/y", "HOME": "/"}
    (unknown, known) = software.variables(subject(**given))
    assert unknown.mark is Mark.CROSS
    assert unknown.text.startswith("TIERCKPT_PERSISTANT_PATH is no setting")
    assert unknown.cure == (
        "unset TIERCKPT_PERSISTANT_PATH, or do you mean TIERCKPT_PERSISTENT_PATH?"
    )
    assert known.text == "set: TIERCKPT_PATH"
    with pytest.raises(ConfigError, match="persistant_path"):
        load_config({}, given)
    del given["TIERCKPT_PERSISTANT_PATH"]  # the cure
    assert not crosses([*software.variables(subject(**given))])
    load_config({}, given)


def test_all_variables_of_tierckpt_itself_are_known() -> None:
    names = [f"TIERCKPT_{name.upper()}" for name in software.known_settings()]
    own = ["TIERCKPT_CONFIG", "TIERCKPT_ENCRYPTION_KEY", "TIERCKPT_COPY_ENGINE", "TIERCKPT_ATTEMPT"]
    assert software.unknown_variables(dict.fromkeys([*names, *own, *software.INTERNAL], "")) == []


def test_a_value_of_a_variable_is_not_shown() -> None:
    (found,) = software.variables(subject(TIERCKPT_PERSISTENT_STORAGE_OPTIONS='{"key": "secret"}'))
    assert "secret" not in found.text


def test_a_conflict_of_settings_is_a_cross_in_the_words_of_the_job(tmp_path: Path) -> None:
    given = {"TIERCKPT_PATH": "/x", "TIERCKPT_PERSISTENT_PATH": "/x", "TIERCKPT_PTH": "/z"}
    (found,) = software.configuration(subject(**given))
    assert found.mark is Mark.CROSS
    assert found.text.startswith("path and persistent_path are both '/x'")
    file = tmp_path / "settings.toml"
    file.write_text("[local]\nkeep = 0\n")
    (found,) = software.configuration(subject(TIERCKPT_CONFIG=str(file)))
    assert "local_keep" in found.text


def test_settings_without_effect_are_a_warning() -> None:
    idle, valid = software.configuration(subject(TIERCKPT_PERSISTENT_KEEP="3"))
    assert (idle.mark, idle.text.split()[-1]) == (Mark.WARNING, "persistent_keep")
    assert valid.text == "valid; levels: memory, local"


def test_places_are_examined_though_other_settings_are_invalid() -> None:
    config = software.valid_config({"path": "/there"}, {"TIERCKPT_SLOTS": "1"})
    assert config.path == "/there"
    given = {"TIERCKPT_SLOTS": "1", "TIERCKPT_PATH": "/a", "TIERCKPT_PERSISTENT_PATH": "/b"}
    config = software.valid_config({}, given)
    assert (config.path, config.persistent.path) == ("/a", "/b")
    config = software.valid_config({}, {**given, "TIERCKPT_CONFIG": "/no/such/file"})
    assert (config.path, config.persistent.path) == ("/a", "/b")


@pytest.mark.parametrize(
    ("export", "mark", "text"),
    [
        ("prometheus 9400", Mark.GOOD, "127.0.0.1:9400 on this machine alone"),
        ("wandb, prometheus *:9400", Mark.WARNING, "everybody who reaches 0.0.0.0:9400 reads"),
    ],
)
def test_who_can_read_the_metrics_is_said(
    export: str, mark: Mark, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    *_, found = software.configuration(subject(TIERCKPT_EXPORT=export))
    assert found.mark is mark
    assert text in found.text


@pytest.mark.parametrize(
    ("given", "text", "cure"),
    [
        (
            {"TIERCKPT_EXPORT": "grafana"},
            "export is 'grafana'; it takes one or several of these",
            "change this setting: see docs/settings.md",
        ),
        (
            {"TIERCKPT_EXPORT": "prometheus 9400"},
            "export is 'prometheus 9400': the exporter to prometheus needs the package "
            "prometheus_client, which is not installed",
            "pip install 'tierckpt[prometheus]'",
        ),
        (
            {"TIERCKPT_HALT_NOTICES": "aws,gcp"},
            "halt_notices is 'aws,gcp'; valid is one of aws, gcp, azure",
            "change this setting: see docs/settings.md",
        ),
    ],
)
def test_an_exporter_or_a_cloud_that_cannot_be_used_is_a_cross(
    given: dict[str, str], text: str, cure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (found,) = software.configuration(subject(**given))
    assert found.mark is Mark.CROSS
    assert found.text.startswith(text)
    assert "; run" not in found.text
    assert found.cure == cure


# --- notices -------------------------------------------------------------------------------------


def notices(endpoint: str) -> list[Finding]:
    config = load_config({"halt_notices": f"aws {endpoint}"}, {})
    return [*software.notices(Subject(config, {}))]


def test_the_service_of_the_cloud_is_asked() -> None:
    assert [*software.notices(Subject())] == []
    with serving(cloud := Aws()) as server:
        (found,) = notices(server.endpoint)
        assert found.mark is Mark.GOOD
        assert found.text == f"aws answers at {server.endpoint}, and announces no end"
        cloud.announce(100)
        (found,) = notices(server.endpoint)
        assert found.mark is Mark.CROSS
        assert found.text == "aws takes this machine away (action terminate)"


def test_a_missing_service_is_a_warning() -> None:
    (found,) = notices("http://127.0.0.1:9")
    assert found.mark is Mark.WARNING
    assert found.text.startswith("http://127.0.0.1:9 does not answer as aws does (")
    assert found.cure.startswith("unset TIERCKPT_HALT_NOTICES, unless ")
    assert found.cure.endswith(" --http-put-response-hop-limit 2")


# --- agents --------------------------------------------------------------------------------------

JOB = """
import sys, tierckpt
from tierckpt.testing import TinyJob
with TinyJob("ckpts", shm_dir=sys.argv[1]) as job:
    job.run(1)
    job.checkpointer.wait()
    print("runs", flush=True)
    sys.stdin.readline()
"""


def test_the_agent_of_another_version_is_a_warning(
    warm_python: None, tmp_path: Path, shm_dir: Path
) -> None:
    """A job started before an upgrade, and still with the old code."""
    old = tmp_path / "old"
    shutil.copytree(Path(tierckpt.__file__).parent, old / "tierckpt")
    (old / "tierckpt/_version.py").write_text('__version__ = "0.0.9"\n')
    config = load_config({"shm_dir": str(shm_dir)}, {})
    assert [*software.agents(Subject(config))] == []
    with subprocess.Popen(
        [PYTHON, "-c", JOB, str(shm_dir)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(old)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "runs\n"
        (found,) = software.agents(Subject(config))
        job.communicate("\n")
    assert found.mark is Mark.WARNING
    assert f"runs Tierckpt 0.0.9 of {old}; here is {tierckpt.__version__}" in found.text
    assert "or: kill " in found.cure


@pytest.mark.parametrize("step_seconds", [2, 40])
def test_iterations_that_are_too_long_for_a_signal_are_a_warning(
    step_seconds: int, tmp_path: Path
) -> None:
    config = load_config({"path": "/x", "events_dir": str(tmp_path)}, {})
    assert [*software.iterations(Subject(config))] == [], "no job has run"
    log = EventLog(0, str(tmp_path))
    names = ("import", "setup", "attach", "boundary", "barrier", "save")
    facts = {"host": "here", "world": 1, "shim": False, "heartbeat_seconds": 5, "job": "job"}
    for version, name in enumerate(["started", "attached", *["progress"] * 5], start=-1):
        at = {"time_seconds": 1e9 + version * step_seconds}
        at["monotonic_seconds"] = at["time_seconds"]
        log.record(name, version=version, seconds=dict.fromkeys(names, 0.0), facts=facts, **at)
    log.close()
    (found,) = software.iterations(Subject(config))
    assert found.mark is (Mark.WARNING if step_seconds == 40 else Mark.GOOD)
    assert f"{step_seconds} s" in found.text
    if step_seconds == 40:
        assert "set halt_grace_seconds" in found.cure
