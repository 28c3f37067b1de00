"""The command line with unusual arguments, and with outputs that fail."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest
from rich.console import Console

from tierckpt.cli import GROUPS, UNLIMITED, doctor, run_command, versions
from tierckpt.doctor import Report, Section, good, warning

TAKE_A_PLACE = {
    "halt": ["--show"],
    "health": [],
    "list": [],
    "watch": ["--once"],
    "verify": [],
    "export": ["out.pt"],
    "pin": ["1"],
    "unpin": ["1"],
    "takeover": [],
}
"""Commands, and their arguments after a place."""


def run(
    *arguments: str | bytes, out: int | None = subprocess.PIPE, **environment: str
) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a separate process."""
    done = subprocess.run(
        [sys.executable, "-m", "tierckpt", *arguments],
        stdout=out,
        stderr=subprocess.PIPE,
        env={**os.environ, **environment},
    )
    return done.returncode, (done.stdout or b"").decode(), done.stderr.decode()


def test_the_console_script_is_main() -> None:
    setup = ConfigParser()
    setup.read(Path(__file__).parents[3] / "setup.cfg")
    scripts = setup["options.entry_points"]["console_scripts"].split("\n")
    assert f"tierckpt = {run_command.__module__}:{run_command.__name__}" in scripts


def test_without_a_command_it_shows_how_to_use_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_command([])
    assert ended.value.code == 2
    assert "usage: tierckpt" in capsys.readouterr().err


def test_every_command_has_a_line_of_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_command(["--help"])
    said = capsys.readouterr().out
    for title, commands in GROUPS.items():
        _, _, lines = said.partition(f"\n{title}:\n")
        for command in commands:
            assert f"\n  {command.name} " in f"\n{lines}"


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (["lst"], "there is no command 'lst'; did you mean list?"),
        (["xxxx"], "there is no command 'xxxx'; --help lists all"),
        (["list", "--jsn", "."], "unrecognized arguments: --jsn; did you mean --json?"),
    ],
)
def test_a_misspelt_name_is_answered_with_the_nearest(
    wrong: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        run_command(wrong)
    assert end.value.code == 2
    assert told in capsys.readouterr().err


def test_help_and_refusals_of_what_is_not_there_need_neither_torch_nor_numpy(
    tmp_path: Path,
) -> None:
    """The arguments are beside the functions that carry them out; their import would take a
    second."""
    (tmp_path / "empty").touch()
    wrong = ["import gone p", "import empty p", "export gone out.pt", "export . empty", "prove"]
    wrong += ["export . gone/out.pt", "diff gone 1 2", "verify gone"]
    program = (
        "import sys; from tierckpt.cli.main import main, whole_parser; whole_parser(); "
        f"print([main(each.split()) for each in {wrong}], "
        "[m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == "[1, 1, 1, 1, 2, 1, 2, 1] []", done.stderr


@pytest.mark.parametrize("command", TAKE_A_PLACE)
@pytest.mark.parametrize("empty", ["", "file://"])
def test_an_empty_path_is_not_the_working_directory(
    empty: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shell makes it of an unset variable."""
    with pytest.raises(SystemExit) as end:
        run_command([command, empty, *TAKE_A_PLACE[command]])
    assert end.value.code == 2
    assert "argument PATH: the path is empty; give a directory" in capsys.readouterr().err


def test_in_quotes_too_a_tilde_is_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in the job's own settings; a path with {node} needs the quotes."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "n1" / "ckpts").mkdir(parents=True)
    assert run_command(["list", "~/{node}/ckpts"]) == 0
    assert f"{tmp_path}/{{node}}/ckpts: no checkpoints here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("what", "command"),
    [
        *(("a file", command) for command in TAKE_A_PLACE),
        *(("not there", command) for command in TAKE_A_PLACE),
        *(("below a file", "verify"), ("below a file", "pin"), ("too long", "list")),
    ],
)
def test_a_path_but_no_directory_is_an_error_of_one_sentence(
    what: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "a file").touch()
    names = {"a file": file, "below a file": file / "x", "too long": tmp_path / ("x" * 300)}
    path = str(names.get(what, tmp_path / what))
    given = [str(tmp_path / each) if "." in each else each for each in TAKE_A_PLACE[command]]
    assert run_command([command, path, *given]) == 1
    out, told = capsys.readouterr()
    assert path in told + out
    assert told.startswith("tierckpt: ")
    assert told.count("\n") == 1
    assert [each.name for each in tmp_path.iterdir()] == ["a file"]


@pytest.mark.parametrize("name", ["チェックポイント", b"no text \xff\xfe"])
def test_a_name_that_the_terminal_cannot_encode_is_shown_nevertheless(
    name: str | bytes, tmp_path: Path
) -> None:
    path = os.path.join(os.fsencode(tmp_path), os.fsencode(name))
    os.mkdir(path)
    status, out, told = run("list", path, PYTHONIOENCODING="ascii")
    assert (status, told) == (0, "")
    assert f"{tmp_path}/" in out
    assert "no checkpoints here" in out


def test_output_that_nobody_reads_ends_it_in_silence(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        status, _, told = run("list", str(tmp_path), out=write)
    finally:
        os.close(write)
    assert (status, told) == (1, "")


def test_a_pipe_has_no_width_and_no_line_of_doctor_is_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    consoles: list[Console] = []
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(versions, "list_versions", lambda args, console: consoles.append(console))
    assert run_command(["list", "."]) == 0
    assert consoles[0].width == UNLIMITED
    long = "word " * 60
    findings = (good("torch", long), warning("clock", long, long))
    doctor._print([Report("here", (Section("Machine", findings),))], consoles[0])
    lines = capsys.readouterr().out.splitlines()
    assert [line.count("word") for line in lines] == [0, 60, 60, 60, 0]


def test_output_to_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        status, _, told = run("list", str(tmp_path), out=full.fileno())
    assert (status, told) == (1, "tierckpt: [Errno 28] No space left on device\n")


def test_without_an_output_it_does_its_work(tmp_path: Path) -> None:
    line = f"{sys.executable} -m tierckpt health '{tmp_path}' >&-"
    done = subprocess.run(["sh", "-c", line], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_pictures_place_without_a_directory_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace-r00000.json"
    start = {"ph": "i", "cat": "begin", "pid": 0, "tid": 0, "ts": 1, "name": "x", "args": {}}
    trace.write_text(json.dumps([start]))
    assert run_command(["trace", "merge", str(trace / "out.json"), "--ours", str(trace)]) == 1
    assert capsys.readouterr().err.startswith(f"tierckpt: cannot write {trace}/out.json: ")


COMPLETIONS = {
    "tierckpt ver": {"verify"},
    "tierckpt delete --v": {"--versions"},
    "tierckpt list ck": {"ckpts"},
}
IN_SHELL = {
    "bash": """source ./script
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
"$(complete -p tierckpt | grep -o '_[^ ]*')"; printf '%s\\n' "${{COMPREPLY[@]}}" """,
    "zsh": "",
    "fish": "source ./script; complete --do-complete '{words}'",
}


@pytest.mark.parametrize("shell", IN_SHELL)
def test_a_shell_completes_commands_options_and_paths(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In zsh, completion needs a terminal: there the script is only parsed."""
    pytest.importorskip("shtab", reason="shtab is not installed")
    assert run_command(["completion", shell]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    (tmp_path / "ckpts").mkdir()
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    if shell == "zsh":
        subprocess.run([shell, "-n", "script"], cwd=tmp_path, check=True)
        return
    for words, expected in COMPLETIONS.items():
        program = IN_SHELL[shell].format(words=words)
        done = subprocess.run([shell, "-c", program], cwd=tmp_path, capture_output=True, text=True)
        found = {line.split("\t")[0].rstrip("/") for line in done.stdout.splitlines()}
        assert (found, done.stderr) == (expected, "")
