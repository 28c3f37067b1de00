"""The command line of `tierckpt run`."""

from __future__ import annotations

import pytest

from tierckpt.run import parse_options


def test_everything_after_the_script_is_the_scripts() -> None:
    found = parse_options(["--max-restarts", "7", "train.py", "--max-restarts", "1", "-m", "x"])
    assert (found.program, found.is_module, found.max_restarts) == ("train.py", False, 7)
    assert found.arguments == ("--max-restarts", "1", "-m", "x")


def test_a_module() -> None:
    found = parse_options(["--preload", "a,b.c", "-m", "pkg.train", "--times", "t"])
    assert (found.program, found.is_module) == ("pkg.train", True)
    assert (found.arguments, found.preload, found.times) == (("--times", "t"), ("a", "b.c"), "")


@pytest.mark.parametrize("before", [["-m", "pkg.train"], ["train.py"], ["--", "train.py"]])
def test_two_dashes_after_the_program_are_its_own_as_pythons(before: list[str]) -> None:
    assert parse_options([*before, "--", "x", "--", "y"]).arguments == ("--", "x", "--", "y")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "a script, or -m and a module, is missing"),
        (["--max-restarts", "-1", "x.py"], "--max-restarts must be 0 or more"),
        (["--rendezvous", "host", "x.py"], "--rendezvous must be HOST:PORT"),
        (["--standby", "x.py"], "--standby needs --rendezvous HOST:PORT"),
        (["-m"], "a script, or -m and a module, is missing"),
        (["python3.11", "train.py"], "leave out python3.11"),
        (["/usr/bin/python", "train.py"], "leave out /usr/bin/python"),
    ],
)
def test_a_wrong_command(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse_options(arguments)
    assert end.value.code == 2
    assert text in capsys.readouterr().err
