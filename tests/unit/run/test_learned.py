"""The record of modules that the last run of a script imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tierckpt.run import Learned, LearnedFile


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LearnedFile:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return LearnedFile("train.py", False)


def test_it_holds_installed_modules_and_none_of_the_users(file: LearnedFile) -> None:
    assert file.read() == Learned()
    file.learn()
    modules = file.read().modules
    assert {"pytest", "json"} <= set(modules)
    assert not [m for m in modules if m.startswith(("tierckpt", "tests", "__main__"))]


def test_each_script_has_its_own(file: LearnedFile) -> None:
    assert file.path != LearnedFile("other.py", False).path
    assert file.path != LearnedFile("train.py", True).path
    assert file.path == LearnedFile("./train.py", False).path


def test_a_refused_package_does_not_come_back(file: LearnedFile) -> None:
    file.learn()
    file.refuse("pytest")
    assert "pytest" not in file.read().modules
    before = file.path.stat().st_ino
    file.learn()
    assert "pytest" not in file.read().modules
    assert file.path.stat().st_ino == before  # nothing new: not written


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 9, "modules": [], "refused": []}'])
def test_an_unreadable_file_counts_as_none(file: LearnedFile, content: str) -> None:
    file.path.parent.mkdir(parents=True)
    file.path.write_text(content)
    assert file.read() == Learned()


def test_a_place_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    LearnedFile("train.py", False).learn()


def test_a_module_run_with_m_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "pytest" in sys.modules
    assert not [m for m in LearnedFile("pytest", True).imported() if m.startswith("pytest.")]
