"""The copy engine copies and hashes the blocks of a plan once they are released, on any threads."""

from __future__ import annotations

import ctypes
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from tierckpt.format import digest
from tierckpt.snapshot import CopyPlan, Desk, Job, Library, Progress, Table, copy_engine
from tierckpt.state import TrainingState

Hash = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t)


@pytest.fixture
def engine() -> Library:
    found = copy_engine.find()
    if found is None:
        pytest.skip("the copy engine is not built: python setup.py build_ext --inplace")
    return found


@pytest.fixture
def own_engine(engine: Library) -> Library:
    """A second one, with a hash function that tests may replace."""
    hashes = next(copy_engine._hash_libraries())
    return Library(engine.path, hashes)


class Memory:
    """Sources at odd addresses, a target, and the table for both."""

    def __init__(self, blocks: list[list[int]], seed: int = 0) -> None:
        """`blocks`: the lengths of the segments of each block."""
        rng = random.Random(seed)
        self.parts: list[np.ndarray] = []
        segments, rows, offset = [], [], 0
        for lengths in blocks:
            rows.append((len(segments), len(lengths), offset, sum(lengths)))
            offset += sum(lengths)
            for length in lengths:
                skip = rng.randrange(64)
                part = np.frombuffer(rng.randbytes(length + skip), np.uint8)[skip:]
                self.parts.append(part)
                segments.append((part.ctypes.data, length))
        self.table = Table(
            np.array(segments, np.uint64).reshape(-1, 2), np.array(rows, np.uint64).reshape(-1, 4)
        )
        self._target = np.zeros(offset + 64, np.uint8)
        self.target = self._target[rng.randrange(64) :][:offset]
        self.rows = rows

    def expected(self) -> bytes:
        return b"".join(part.tobytes() for part in self.parts)

    def digests(self) -> bytes:
        data = self.expected()
        return b"".join(digest(data[o : o + n]) for *_, o, n in self.rows)

    def job(self, engine: Library) -> Job:
        job = Job(engine, self.table)
        job.bind(self.target.ctypes.data)
        return job


def digests_of(job: Job) -> bytes:
    """Those of the blocks, without head and tail."""
    return job.results()[2]


SHAPES = {
    "no block": [],
    "an empty block": [[]],
    "one byte": [[1]],
    "tiny segments": [[1, 2, 3, 0, 5], [7, 64, 4]],
    "around a stream's unit": [[n] for n in (63, 64, 65, 255, 256, 257, 319, 320, 1000)],
    "whole blocks": [[512 * 1024]] * 3 + [[17]],
    "many small": [[16 * 1024] * 32, [4, 256, 16384] * 10],
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(2))
def test_every_byte_and_digest_is_right(engine: Library, shape: str, seed: int) -> None:
    memory = Memory(SHAPES[shape], seed)
    job = memory.job(engine)
    job.release(None)
    assert job.run(0.0) is Progress.COMPLETE
    assert memory.target.tobytes() == memory.expected()
    assert memory._target.sum() == memory.target.sum(), "the bytes around it stay"
    assert digests_of(job) == memory.digests()


def test_only_released_blocks_are_copied_each_once(own_engine: Library) -> None:
    memory = Memory([[100], [200], [300]])
    seen: list[int] = []
    replace_hash(own_engine, lambda _address, nbytes: seen.append(nbytes) or 0)
    job = memory.job(own_engine)
    assert job.run(0.0) is Progress.IDLE
    assert job.held() == {0, 1, 2}
    job.release([2, 0])
    assert job.held() == {1}
    job.release([0])
    assert job.run(0.0) is Progress.IDLE
    assert job.help() is Progress.IDLE
    assert seen == [300, 100]
    assert not memory.target[100:300].any()
    job.release(None)
    job.release(None)
    assert job.help() is Progress.COMPLETE
    assert seen == [300, 100, 200]


def test_several_threads_share_the_blocks(engine: Library) -> None:
    memory = Memory([[4096, 100]] * 500)
    for _ in range(20):
        memory.target[:] = 0
        job = memory.job(engine)
        run = partial(job.run, 30.0)
        with running(run) as one, running(run) as two:
            for block in range(0, 500, 50):
                job.release(range(block, block + 50))
            assert job.help() is Progress.COMPLETE
            assert memory.target.tobytes() == memory.expected()
            assert digests_of(job) == memory.digests()
        assert one == two == [Progress.COMPLETE]


def test_an_abort_ends_all_calls(engine: Library) -> None:
    memory = Memory([[100], [200]])
    job = memory.job(engine)
    job.release([0])
    assert job.run(0.0) is Progress.IDLE
    with running(lambda: job.run(30.0)) as ended:
        job.abort()
    assert ended == [Progress.ABORTED]
    job.release(None)
    assert job.take() is None
    assert job.help() is job.run(0.0) is job.wait(0.0) is Progress.ABORTED
    assert not memory.target[100:].any()


def test_an_abort_ends_a_helper_though_a_taken_block_is_never_copied(engine: Library) -> None:
    job = Memory([[100]]).job(engine)
    job.release(None)
    assert job.take() == 0
    with running(job.help) as ended:
        job.abort()
    assert ended == [Progress.ABORTED]


def test_blocks_can_be_copied_one_by_one(engine: Library) -> None:
    memory = Memory([[100], [200, 1]])
    job = memory.job(engine)
    assert job.wait(0.0) is Progress.IDLE
    job.release(None)
    assert job.wait(120.0) is Progress.UNFINISHED
    taken = []
    while (block := job.take()) is not None:
        taken.append(block)
        job.copy_one(block)
    assert taken == [0, 1]
    assert job.run(0.0) is Progress.COMPLETE
    assert digests_of(job) == memory.digests()
    assert all(seconds > 0 for seconds in job.results()[:2])


# --- the copier's desk ---------------------------------------------------------------------------

HEAD, TAIL, ROOM = b"the head", b"a tail", 40


def post(desk: Desk, job: Job, memory: Memory) -> tuple[bool, np.ndarray]:
    """Post a job for an image with `HEAD` and `TAIL`; returns the image as well."""
    nbytes = len(memory.target)
    image = np.full(len(HEAD) + nbytes + ROOM, 0xFF, np.uint8)
    posted = desk.post(job, image, image.ctypes.data, (HEAD, nbytes, TAIL, ROOM))
    return posted, image


def test_a_posted_job_is_copied_with_head_and_tail(engine: Library) -> None:
    memory, desk = Memory([[100], [64 * 1024, 7]]), Desk(engine)
    with running(lambda: desk.serve(30.0, 0.0)) as served:
        job = Job(engine, memory.table)
        posted, image = post(desk, job, memory)
        assert posted
    assert served == [Progress.COMPLETE]  # no thread has settled it
    tail = TAIL.ljust(ROOM, b"\0")
    assert image.tobytes() == HEAD + memory.expected() + tail
    assert job.results()[2] == digest(HEAD) + memory.digests() + digest(tail)
    assert not job.copying


def test_the_copier_serves_one_job_after_another_and_returns_for_none_of_them(
    engine: Library,
) -> None:
    memory, desk = Memory([[64 * 1024]] * 8), Desk(engine)
    with running(lambda: desk.serve(30.0, 30.0)) as served:
        for _ in range(50):
            job = Job(engine, memory.table)
            while not post(desk, job, memory)[0]:
                pass  # it has not left the last one
            assert job.help() is Progress.COMPLETE
            desk.settle(job)
        assert served == []
        desk.ring()
    assert served == [Progress.UNFINISHED]


def test_a_settled_job_that_no_thread_has_started_makes_room(engine: Library) -> None:
    memory, desk = Memory([[100]]), Desk(engine)
    first, second = Job(engine, memory.table), Job(engine, memory.table)
    assert post(desk, first, memory)[0]
    assert not post(desk, second, memory)[0]
    assert second.held() == {0}
    assert first.help() is Progress.COMPLETE
    desk.settle(second)  # another one: without effect
    assert not post(desk, second, memory)[0]
    desk.settle(first)
    assert post(desk, second, memory)[0]


def test_a_job_stays_in_memory_while_the_copier_may_use_it(engine: Library) -> None:
    memory, desk = Memory([[100]]), Desk(engine)
    job = Job(engine, memory.table)
    assert post(desk, job, memory)[0]
    left = weakref.ref(job)
    del job
    assert left() is not None
    for other in (Job(engine, memory.table), Job(engine, memory.table)):
        assert not post(desk, other, memory)[0]
        assert left() is not None
    with running(lambda: desk.serve(30.0, 0.0)):
        pass
    assert post(desk, Job(engine, memory.table), memory)[0]
    assert left() is None


def test_an_aborted_job_calls_the_copier_after_its_block(own_engine: Library) -> None:
    memory, desk = Memory([[100], [200]]), Desk(own_engine)
    inside, resume = threading.Event(), threading.Event()

    def hold(_address: int, nbytes: int) -> int:
        if nbytes == 100:
            inside.set()
            resume.wait(120.0)
        return nbytes

    replace_hash(own_engine, hold)
    job = Job(own_engine, memory.table)
    with running(lambda: desk.serve(30.0, 30.0)) as served:
        post(desk, job, memory)
        assert inside.wait(120.0)
        job.abort()
        assert job.copying
        resume.set()
    assert served == [Progress.ABORTED]
    assert not job.copying


def test_other_work_of_the_copier_does_not_make_it_forget_a_job(engine: Library) -> None:
    memory, desk = Memory([[100]]), Desk(engine)
    job = Job(engine, memory.table)
    post(desk, job, memory)
    desk.ring()
    assert desk.serve(30.0, 0.0) is Progress.UNFINISHED
    assert desk.serve(30.0, 0.0) is Progress.COMPLETE
    assert desk.serve(0.0, 30.0) is Progress.IDLE


def test_a_small_image_is_filled_at_once_again_and_again(engine: Library) -> None:
    memory = Memory([[100], [64 * 1024, 7]])
    job, nbytes = Job(engine, memory.table), memory.table.nbytes
    images = [np.full(len(HEAD) + nbytes + ROOM, 255, np.uint8) for _ in range(2)]
    for image in images:
        job.fill_at_once(image.ctypes.data, (HEAD, nbytes, TAIL, ROOM))
    expected = HEAD + memory.expected() + TAIL.ljust(ROOM, b"\0")
    assert [image.tobytes() for image in images] == [expected, expected]
    _, _, digests = job.results()
    posted, desk = Job(engine, memory.table), Desk(engine)
    assert post(desk, posted, memory)[0]
    assert posted.help(desk) is Progress.COMPLETE
    assert posted.results()[2] == digests


def test_a_barrier_finds_counters_that_changed_and_memory_that_moved(engine: Library) -> None:
    model, desk = torch.nn.Linear(30, 30), Desk(engine)
    state = TrainingState(model, {"optimizer": torch.optim.SGD(model.parameters(), 0.1)})
    plan = CopyPlan(state, state.walk(), 0, 1)
    table, records, nbytes = plan.table(), plan.records, plan.layout.nbytes
    if records is None:
        pytest.skip("tensors are looked into by torch's methods")
    assert table is not None
    image = np.zeros(len(HEAD) + nbytes + ROOM, np.uint8)

    def unchanged(before: bytes | None) -> bool:
        job, counted = Job(engine, table), (table.counters_of(records), before)
        assert desk.post(job, plan, image.ctypes.data, (HEAD, nbytes, TAIL, ROOM), counted)
        assert job.help() is Progress.COMPLETE
        job.results()
        desk.settle(job)
        return job.unchanged

    before = plan.counters()
    assert unchanged(before)
    assert not unchanged(None)
    assert not unchanged(b"")
    with torch.no_grad():
        model.weight.add_(1)
    assert not unchanged(before)
    before = plan.counters()
    assert unchanged(before)
    model.bias.data.untyped_storage().resize_(4096)
    assert not unchanged(before)


def test_without_a_job_the_copier_returns_after_a_time(engine: Library) -> None:
    assert Desk(engine).serve(0.001, 30.0) is Progress.IDLE


def test_a_library_with_another_hash_is_refused(engine: Library, tmp_path: Path) -> None:
    class Other(Library):
        def _check(self, hashed: Callable[..., int]) -> None:
            super()._check(lambda *args: hashed(*args) ^ 1)

    with pytest.raises(ValueError, match="to another value"):
        Other(engine.path, next(copy_engine._hash_libraries()))


def test_a_library_of_another_interface_is_refused(
    engine: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_engine, "INTERFACE", 0)
    with pytest.raises(ValueError, match="install it again"):
        Library(engine.path, next(copy_engine._hash_libraries()))


@pytest.fixture
def looks_again() -> Iterator[None]:
    copy_engine._found.cache_clear()
    yield
    copy_engine._found.cache_clear()


@pytest.mark.usefixtures("looks_again")
def test_the_variable_forbids_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(copy_engine.VARIABLE, "torch")
    assert copy_engine.find() is None
    assert "copied by torch" in copy_engine.describe()
    assert copy_engine.VARIABLE in copy_engine.describe()


@pytest.mark.usefixtures("looks_again")
def test_a_library_that_was_not_built_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_engine, "_NAME", "no such library")
    assert copy_engine.find() is None
    assert "with a C compiler" in copy_engine.describe()


@pytest.mark.usefixtures("engine", "looks_again")
def test_without_a_hash_library_the_reason_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_engine, "_hash_libraries", lambda: iter(["/no/such/library.so"]))
    assert copy_engine.find() is None
    assert "/no/such/library.so" in copy_engine.describe()


def test_a_used_library_is_named(engine: Library) -> None:
    assert engine.path in copy_engine.describe()


def replace_hash(engine: Library, function: Callable[[int, int], int]) -> None:
    engine.hash_keeper = Hash(function)  # type: ignore[attr-defined]
    engine.hash_address = ctypes.cast(engine.hash_keeper, ctypes.c_void_p).value  # type: ignore[attr-defined]


class running:
    """Run a function in a thread; the result is appended to the list that `with` binds."""

    def __init__(self, function: Callable[[], Progress]) -> None:
        self._results: list[Progress] = []
        self._thread = threading.Thread(target=lambda: self._results.append(function()))

    def __enter__(self) -> list[Progress]:
        self._thread.start()
        return self._results

    def __exit__(self, *_: object) -> None:
        self._thread.join(60.0)
        assert not self._thread.is_alive()
