"""SCR's calls in one process: the checkpoint that a program names, and calls that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tierckpt.cli import run_command
from tierckpt.errors import TierckptError
from tierckpt.files.scr_session import CHECKPOINT, OUTPUT, ScrSession, merged, scr_settings
from tierckpt.group import Group, SingleGroup
from tierckpt.storage import LocalStore
from tierckpt.storage.persistent import PersistentStore
from tierckpt.testing import ThreadGroup, run_ranks

Start = Callable[..., ScrSession]


@pytest.fixture
def start(tmp_path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts sessions, each with three checkpoints at hand."""
    monkeypatch.setenv("TIERCKPT_AGENT", "inline")
    monkeypatch.setenv("TIERCKPT_SHM_DIR", str(shm_dir))
    monkeypatch.chdir(tmp_path)
    with ExitStack() as stack:

        def begin(group: Group | None = None, **given: str) -> ScrSession:
            cache = {"SCR_CACHE_BASE": str(tmp_path / "cache"), "SCR_CACHE_SIZE": "9"}
            found = merged({**cache, "SCR_COPY_TYPE": "SINGLE", **given}, {}, {})
            session = ScrSession(scr_settings(found, 1), group or SingleGroup())
            stack.callback(session.files.abandon)
            return session

        yield begin


def write(session: ScrSession, name: str, flags: int = CHECKPOINT) -> bool:
    session.start_output(name, flags)
    Path(session.route("x.txt")).write_text(name)
    return session.complete_output(True)


def three(start: Start) -> None:
    session = start()
    assert all(write(session, f"step_{n}") for n in (1, 2, 3))
    session.finalize()


def read(session: ScrSession) -> str:
    name = session.start_restart()
    assert Path(session.route("x.txt")).read_text() == name
    return name


def test_current_before_a_restart_chooses_the_checkpoint(start: Start) -> None:
    three(start)
    session = start()
    session.current("step_2")
    assert session.have_restart() == "step_2"
    assert read(session) == "step_2"
    assert not session.complete_restart(False)
    assert session.have_restart() == "step_1", "the next older one, as in SCR"
    assert read(session) == "step_1"
    assert session.complete_restart(True)
    assert session.have_restart() is None
    with pytest.raises(TierckptError, match="after the restart or the first output"):
        session.current("step_1")


@pytest.mark.parametrize("ends", ["output", "finalize"])
def test_current_without_a_restart_orders_what_follows(start: Start, ends: str) -> None:
    three(start)
    session = start()
    session.current("step_2")
    if ends == "output":
        assert write(session, "step_2b")
    session.finalize()
    again = start()
    assert again.have_restart() == ("step_2b" if ends == "output" else "step_2")


def test_a_missing_checkpoint_is_no_fresh_start(start: Start) -> None:
    three(start)
    session = start(SCR_CURRENT="step_7")
    with pytest.raises(TierckptError, match=r"'step_7' .*, but: step_3, step_2, step_1"):
        session.have_restart()
    session.files.abandon()
    assert start(SCR_CURRENT="step_1").have_restart() == "step_1"


@pytest.mark.parametrize(("size", "kept"), [({}, 10), ({"SCR_PREFIX_SIZE": "2"}, 2)])
def test_refused_checkpoints_leave_the_cache_and_the_prefix_as_its_size_says(
    start: Start, tmp_path: Path, size: dict[str, str], kept: int
) -> None:
    """SCR keeps all checkpoints in SCR_PREFIX unless SCR_PREFIX_SIZE is set, refused ones, too."""
    given = {"SCR_FLUSH": "1", "SCR_CACHE_SIZE": "2", **size}

    def run(refused: int, *numbers: int) -> None:
        """Refuse so many checkpoints, restart from the next one, and write others."""
        session = start(**given)
        for _ in range(refused):
            if session.have_restart() is not None:
                read(session)
                assert not session.complete_restart(False)
        if session.have_restart() is not None:
            read(session)
            assert session.complete_restart(True)
        assert all(write(session, f"step_{number}") for number in numbers)
        session.finalize()

    run(0, 1, 2, 3)
    run(1, 3, 4)
    run(9, 1, 2, 3)
    run(9, 1, 2)
    assert len(PersistentStore(str(tmp_path / ".tierckpt")).versions()) == kept
    assert start(**given).have_restart() == "step_2"
    (cache,) = (tmp_path / "cache").glob("*/*")
    generations = {key.id.generation for key in LocalStore(cache).keys()}  # noqa: SIM118
    assert len(generations) == 1, "those that were refused have left the cache"


def test_an_output_that_cannot_be_copied_leaves_no_part(start: Start, tmp_path: Path) -> None:
    session = start()
    (tmp_path / "x.txt").mkdir()  # in the way
    assert not write(session, "step_1", CHECKPOINT | OUTPUT)
    assert not list(tmp_path.glob("*part*"))


def test_another_number_of_ranks_reads_an_export(start: Start, tmp_path: Path) -> None:
    def rank(group: ThreadGroup) -> None:
        session = start(group)
        session.start_output("step_1", CHECKPOINT)
        Path(session.route(f"{group.rank}.txt")).write_text(f"{group.rank}")
        assert session.complete_output(True)
        session.finalize()

    run_ranks(2, rank)
    session = start()
    with pytest.raises(TierckptError, match=r"'step_1' has files of 2 ranks, and this job has 1"):
        session.start_restart()
    export = ["export", str(tmp_path / ".tierckpt"), str(tmp_path / "all"), "--format", "files"]
    assert run_command(export) == 0
    assert [(tmp_path / f"all/0000{n}/{n}.txt").read_text() for n in (0, 1)] == ["0", "1"]
    session.current("step_1")
    assert write(session, "step_2")
    session.files.abandon()
    assert start().have_restart() == "step_2"


def test_ranks_with_other_flags_are_refused(start: Start) -> None:
    def rank(group: ThreadGroup) -> str:
        session = start(group)
        with pytest.raises(TierckptError) as error:
            session.start_output("a", CHECKPOINT if group.rank else OUTPUT)
        return str(error.value)

    for text in run_ranks(2, rank):
        assert "start_output('a', 1) by rank 1, and start_output('a', 2) by rank 0" in text
