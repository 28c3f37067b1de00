"""The agent's flusher in trouble: versions that it gives up, retries, or leaves alone."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.facts import facts_of
from tierckpt.agent import (
    Flushed,
    Flusher,
    FlushFailed,
    FlushOrder,
    PersistentSettings,
    Problem,
    ShardGuard,
)
from tierckpt.agent import flusher as flusher_module
from tierckpt.agent.flusher import (
    LEASE_PATIENCE_SECONDS,
    MAX_ROUNDS,
    ROUND_SECONDS,
    STILL_UNDER_WAY,
)
from tierckpt.format import ShardKey, VersionId
from tierckpt.storage import LocalPins, PersistentPins
from tierckpt.storage.persistent import (
    LEASE_SECONDS,
    LeaseHeldError,
    PersistentError,
    PersistentStore,
    PosixBackend,
    ShardSource,
    VersionName,
)
from tierckpt.testing import content_of, injected, manifest_of

SHARDS = 2
PATIENCE_SECONDS = 60.0
LIFE = "5eed"


class Clock:
    """A clock that advances while a thread sleeps, and calls `meanwhile`."""

    def __init__(self) -> None:
        self.seconds = 1e9
        self.begin = self.seconds
        self.meanwhile: Callable[[], None] = lambda: None

    def now(self) -> float:
        return self.seconds

    monotonic = now

    def passed(self) -> float:
        return self.seconds - self.begin

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        self.meanwhile()


def source(key: ShardKey) -> ShardSource:
    return ShardSource(key.shard, memoryview(content_of(key, 1)), manifest_of(key, 1))


def order(version: int, *here: int, run_id: str = LIFE) -> FlushOrder:
    """An order for the node with the shards `here`; by default all of them."""
    return FlushOrder(
        directory="/nowhere",
        here=here or tuple(range(SHARDS)),
        facts=facts_of(VersionId(1, version), SHARDS, run_id),
        largest_bytes=4096,
        node="node0",
    )


def having(wanted: FlushOrder, **facts: Any) -> FlushOrder:
    """The same order, of a version with other facts."""
    return replace(wanted, facts=replace(wanted.facts, **facts))


class Node:
    """One of a job's nodes, and the messages to its trainers."""

    def __init__(self, place: Path, clock: Clock, **settings: Any) -> None:
        self.answers: list[Any] = []
        self.idle = threading.Semaphore(0)
        self.held = ShardGuard()
        made = PersistentSettings(str(place), **settings)
        self.flusher = Flusher(made, self.held, self.idle.release, clock)

    def start(self, wanted: FlushOrder) -> None:
        self.flusher.accept(wanted, self.answers.append)

    def flush(self, wanted: FlushOrder) -> Any:
        """Order a flush, and wait for its result."""
        self.start(wanted)
        self.wait()
        return self.answers[-1]

    def wait(self) -> None:
        assert self.idle.acquire(timeout=PATIENCE_SECONDS), self.answers

    def warnings(self) -> list[str]:
        found = [said for said in self.answers if type(said) is Problem]
        assert all(said.level == "persistent" for said in found)
        return [said.error for said in found]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "shared"


MakeNode = Callable[..., Node]


@pytest.fixture
def node(place: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeNode]:
    """Makes nodes with local shards in memory."""
    nodes: list[Node] = []

    @contextlib.contextmanager
    def in_memory(_: object, key: ShardKey, *rest: object) -> Iterator[ShardSource]:
        yield source(key)

    def make(**settings: Any) -> Node:
        nodes.append(Node(settings.pop("place", place), clock, **settings))
        return nodes[-1]

    monkeypatch.setattr(flusher_module, "open_source", in_memory)
    yield make
    for made in nodes:
        made.flusher.close()


def versions(place: Path) -> list[int]:
    return [name.id.version for name in PersistentStore(str(place)).versions()]


def part_of(place: Path, wanted: FlushOrder, shard: int) -> int:
    """Bytes of the shard that an earlier flush left, as the proof that nothing is written again."""
    key = ShardKey(wanted.name.id, shard, SHARDS)
    return PersistentStore(str(place)).flush(wanted.facts, 4096, [source(key)]).reused_bytes


class Broken:
    """Writes of shards fail in a given way until it is repaired."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
        self.mended, write_at = False, PosixBackend.write_at

        def failing(backend: PosixBackend, *rest: Any) -> None:
            if not self.mended:
                raise OSError(code, "the store has trouble")
            write_at(backend, *rest)

        monkeypatch.setattr(PosixBackend, "write_at", failing)


# --- a version that exists stays -----------------------------------------------------------------


def test_retention_that_fails_costs_no_version(node: MakeNode, place: Path) -> None:
    zero = node(keep="1")
    assert zero.flush(order(1)).complete
    with injected("eacces@file:op=rmdir"):
        said = zero.flush(order(2))
    assert (type(said), said.complete) == (Flushed, True)
    (warning,) = zero.warnings()
    assert "some older versions could not be removed" in warning
    assert versions(place) == [2]
    assert zero.flush(order(3)).complete
    assert versions(place) == [3]
    assert PersistentStore(str(place)).incomplete() == [], "and the rest is removed later"


def test_one_folder_that_cannot_go_keeps_no_other_one(node: MakeNode, place: Path) -> None:
    zero = node(keep="3")
    for version in (1, 2, 3):
        zero.flush(order(version))
    other = node(keep="1")
    with injected("eacces@file:op=rmdir"):
        other.flush(order(4))
    assert versions(place) == [4]
    assert [n.id.version for n in PersistentStore(str(place)).incomplete()] == [3]


def test_of_a_version_that_another_node_completed_nothing_is_removed(
    node: MakeNode, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This node's shards existed before, and it fails only afterwards."""
    zero, wanted, flush = node(), order(1), PersistentStore.flush

    def late(store: PersistentStore, *rest: Any) -> None:
        flush(store, *rest)
        raise PersistentError("a permanent error", str(place), transient=False)

    with monkeypatch.context() as patch:
        patch.setattr(PersistentStore, "flush", late)
        said = zero.flush(wanted)
    assert (type(said), versions(place)) == (Flushed, [1])
    assert not PersistentStore(str(place)).give_up(wanted.name)
    assert versions(place) == [1]


# --- pinned on the way ---------------------------------------------------------------------------


def pinned_on_local(tmp_path: Path, version: int, *here: int) -> FlushOrder:
    wanted = replace(order(version, *here), directory=str(tmp_path / "local"))
    LocalPins(wanted.directory).pin([wanted.name.id], everywhere=True)
    return wanted


def pins(place: Path) -> list[int]:
    return sorted(each.id.version for each in PersistentPins(PersistentStore(str(place))).marked())


def test_the_node_that_completes_a_version_pins_it_as_it_is_on_local(
    node: MakeNode, place: Path, tmp_path: Path
) -> None:
    zero, one = node(keep="1"), node(node=1, keep="1")
    wanted = pinned_on_local(tmp_path, 1, 0)
    zero.flush(wanted)
    assert pins(place) == []
    one.flush(replace(wanted, here=(1,)))
    assert pins(place) == [1]
    for version in (2, 3):
        zero.flush(order(version))
    assert (versions(place), pins(place)) == ([1, 3], [1])


def test_a_pin_that_cannot_be_set_yet_costs_no_version_and_none_is_removed_for_it(
    node: MakeNode, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object) -> None:
        raise PersistentError("no right to pin", str(place), transient=False)

    zero = node(keep="1")
    with monkeypatch.context() as patch:
        patch.setattr(PersistentPins, "pin", forbidden)
        for version in (1, 2):
            said = zero.flush(pinned_on_local(tmp_path, version))
            assert (type(said), said.complete) == (Flushed, True)
    assert len(zero.warnings()) == 2
    assert "v1 could not be pinned as on the local level: no right to pin" in zero.warnings()[0]
    assert (versions(place), pins(place)) == ([1, 2], [])
    zero.flush(order(3))
    assert (versions(place), pins(place)) == ([1, 2, 3], [1, 2])


def test_a_pin_removed_while_it_is_set_is_gone(
    node: MakeNode, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, pin = pinned_on_local(tmp_path, 1), PersistentPins.pin

    def late(pins: PersistentPins, names: list[VersionName]) -> set[VersionName]:
        LocalPins(wanted.directory).unmark([name.id for name in names])  # a later one finds none
        return pin(pins, names)

    monkeypatch.setattr(PersistentPins, "pin", late)
    assert node().flush(wanted).complete
    assert (versions(place), pins(place)) == ([1], [])


# --- progress and hangs --------------------------------------------------------------------------


def test_a_flush_that_waits_on_purpose_makes_progress_and_one_to_a_hanging_store_does_not(
    node: MakeNode, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, resume = threading.Event(), threading.Event()
    looks: list[float] = []
    write_at = PosixBackend.write_at

    def write(backend: PosixBackend, *rest: Any) -> None:
        if looks:  # it has waited: this is a window
            looks.append(zero.flusher.progress_at)
            hangs.set()
            assert resume.wait(PATIENCE_SECONDS)
        write_at(backend, *rest)

    monkeypatch.setattr("tierckpt.agent.flusher.WINDOW_BYTES", 1)  # which may come at once
    zero = node(bytes_per_second=100.0)
    made = zero.flusher.progress_at
    clock.meanwhile = lambda: looks.append(zero.flusher.progress_at)
    with monkeypatch.context() as patch:
        patch.setattr(PosixBackend, "write_at", write)
        zero.start(order(1))
        assert hangs.wait(PATIENCE_SECONDS)
        assert len(looks) > 3
        assert made < looks[0] < looks[-1], "while it waits for its share of the rate"
        assert zero.flusher.progress_at == looks[-1], "and no more"
        quiet = zero.flusher.quiet_seconds()
        assert quiet > 0
        assert zero.flusher.quiet_seconds() > quiet
        resume.set()
        zero.wait()
    assert zero.answers[-1].complete
    assert zero.flusher.quiet_seconds() == 0, "nothing is under way"


# --- passing and lasting trouble -----------------------------------------------------------------


def test_a_transient_error_is_reported_and_the_version_is_tried_again(
    node: MakeNode, place: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Broken(monkeypatch, errno.EIO)

    def mend() -> None:
        broken.mended = clock.passed() > ROUND_SECONDS

    clock.meanwhile = mend
    zero = node()
    assert zero.flush(order(1)).complete
    tried, as_a_whole = zero.warnings()
    assert tried.startswith("v1: ")
    assert "the store has trouble; try 2 in" in tried
    assert "Parts stored so far stay; the whole version is tried again" in as_a_whole
    assert versions(place) == [1]


def test_trouble_that_passes_too_late_costs_no_other_nodes_part(
    node: MakeNode, place: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, zero = order(1, 0), node()
    assert not zero.flush(wanted).complete
    broken, one = Broken(monkeypatch, errno.EIO), node(node=1)
    said = one.flush(order(1, 1))
    assert (type(said), said.superseded) == (FlushFailed, False)
    assert clock.passed() > (MAX_ROUNDS - 1) * ROUND_SECONDS
    assert ShardKey(wanted.name.id, 1, SHARDS) not in one.held
    broken.mended = True
    assert part_of(place, wanted, 0) == 4096
    assert one.flush(order(1, 1)).complete
    assert versions(place) == [1]


def test_trouble_that_stays_gives_the_room_back(
    node: MakeNode, place: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero, one = node(), node(node=1)
    zero.flush(order(1, 0))
    assert len(PersistentStore(str(place)).incomplete()) == 1
    Broken(monkeypatch, errno.ENOSPC)
    said = one.flush(order(1, 1))
    assert "free space" in said.error
    assert clock.passed() == 0, "tried again it would be the same"
    assert PersistentStore(str(place)).incomplete() == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_place_has_older_versions_removed_as_is_wanted_now(
    code: int, node: MakeNode, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without room for one more version, none would be committed, and retention would never run."""
    zero, two = node(keep="3"), having(order(4, 0), run_id="11fe", id=VersionId(2, 4))
    successor = node(keep="1")
    for version in (1, 2, 3):
        assert zero.flush(order(version)).complete
    zero.flusher.close()
    two = having(two, lineage=((1, 0), (2, 3)))
    assert not successor.flush(two).complete, "another node has the rest"
    broken = Broken(monkeypatch, code)
    said = successor.flush(having(two, id=VersionId(2, 5), iteration=5))
    assert type(said) is FlushFailed
    assert "one more than persistent_keep says must fit" in said.error
    assert versions(place) == [3], "the version that a restart would take stays"
    assert PersistentStore(str(place)).incomplete() == [two.name], "another node may be at it"
    broken.mended = True
    assert part_of(place, two, 1) == 0
    assert versions(place) == [3, 4]


def test_another_error_removes_nothing(
    node: MakeNode, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero, other = node(keep="2"), node(keep="1")
    for version in (1, 2):
        zero.flush(order(version))
    Broken(monkeypatch, errno.EACCES)
    assert type(other.flush(order(3))) is FlushFailed
    assert versions(place) == [1, 2]


# --- the lease -----------------------------------------------------------------------------------


def test_a_place_that_another_job_holds_is_reported_and_given_up(
    node: MakeNode, place: Path, clock: Clock
) -> None:
    place.mkdir()
    other = PersistentStore(str(place)).lease("11fe", "another job on node9", clock)
    other.ensure()
    clock.meanwhile = other.keep
    zero = node()
    said = zero.flush(order(1))
    assert type(said) is FlushFailed
    assert "another job on node9" in said.error
    assert LEASE_PATIENCE_SECONDS <= clock.passed() < 2 * LEASE_PATIENCE_SECONDS
    (warning,) = zero.warnings()
    assert warning.startswith("v1 waits: ")
    assert "in use by another job on node9" in warning
    clock.meanwhile = lambda: None  # it ends
    assert zero.flush(order(2)).complete, "the next one is tried as usual"
    assert clock.passed() > LEASE_PATIENCE_SECONDS + LEASE_SECONDS / 2


def test_only_the_first_node_has_the_lease_kept(node: MakeNode) -> None:
    zero, one = node(), node(node=1)
    zero.flush(order(1, 0))
    one.flush(order(1, 1))
    keeping = zero.flusher._keeper._thread
    assert keeping is not None
    assert one.flusher._keeper._thread is None
    zero.flusher.close()
    assert not keeping.is_alive()


def test_no_lease_is_kept_for_dead_ranks(node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flush that they ordered keeps the lease until its end, and no longer."""
    come, resume = threading.Event(), threading.Event()
    write_at = PosixBackend.write_at

    def write(backend: PosixBackend, *rest: Any) -> None:
        come.set()
        assert resume.wait(PATIENCE_SECONDS)
        write_at(backend, *rest)

    zero = node()
    keeper = zero.flusher._keeper
    with monkeypatch.context() as patch:
        patch.setattr(PosixBackend, "write_at", write)
        zero.start(order(1, 0))
        zero.start(order(2, 0))
        assert come.wait(PATIENCE_SECONDS)
        keeping = keeper._thread
        assert keeping is not None
        zero.flusher.rest()
        keeping.join(PATIENCE_SECONDS)
        assert not keeping.is_alive()
        resume.set()
        zero.wait()
    assert [type(said) for said in zero.answers] == [Flushed, Flushed]
    assert keeper._thread is None
    zero.flush(order(3, 0))
    assert keeper._thread is not None, "a trainer lives again"


def test_an_abandoned_flush_keeps_its_files_and_leaves_the_lease_alone(
    node: MakeNode, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run with another agent has started."""
    come, resume = threading.Event(), threading.Event()
    write_at = PosixBackend.write_at

    def write(backend: PosixBackend, *rest: Any) -> None:
        write_at(backend, *rest)
        come.set()
        assert resume.wait(PATIENCE_SECONDS)

    zero = node()
    zero.flush(order(1, 0, 1))
    with monkeypatch.context() as patch:
        patch.setattr(PosixBackend, "write_at", write)
        for version in (2, 3):
            zero.start(order(version, 0, 1))
        assert come.wait(PATIENCE_SECONDS)
        assert zero.flusher.cancel() == [2, 3]
        successor = PersistentStore(str(place)).lease("11fe", "job on node0")
        successor.ensure()
        resume.set()
        zero.wait()
    assert not zero.flusher.busy()
    assert successor.held()
    assert zero.flusher._keeper._thread is None
    assert versions(place) == [1]
    assert sorted(begun(place)) == [1, 2], "its files stay"
    with pytest.raises(RuntimeError, match="shuts down"):
        zero.start(order(4, 0))


def test_a_flush_that_outlasts_the_lease_keeps_it(
    node: MakeNode, place: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it is not lost to another run: at every moment this run holds the place."""
    monkeypatch.setattr(flusher_module, "WINDOW_BYTES", 1)  # nothing may go at once
    zero = node(bytes_per_second=4096 / LEASE_SECONDS)
    monkeypatch.setattr(zero.flusher._keeper, "keep", lambda *whose: None)
    lives: set[str] = set()

    watcher = PersistentStore(str(place)).lease("11fe", "another job", clock)

    def look() -> None:
        with contextlib.suppress(LeaseHeldError):
            watcher.ensure()
        holder = watcher.newest()
        lives.add(holder.run_id if holder is not None else "nobody")

    clock.meanwhile = look
    assert zero.flush(order(1)).complete
    assert clock.passed() > 1.5 * LEASE_SECONDS
    assert lives == {LIFE}


@pytest.mark.parametrize("killed", [True, False])
@pytest.mark.parametrize("complete", [True, False])
def test_the_lease_is_given_back_when_all_nodes_are_through(
    complete: bool, killed: bool, node: MakeNode, place: Path, clock: Clock
) -> None:
    """A job that has ended does not delay its successor on other nodes."""
    zero, one = node(), node(node=1)
    zero.flush(order(1, 0))
    if complete:
        one.flush(order(1, 1))
    if killed:  # and its agent waits for a successor
        zero.flusher.rest()
        zero.flusher.rest()
        giving_back = zero.flusher._keeper._shutdown
        assert giving_back is not None
        giving_back.join(PATIENCE_SECONDS)
    else:
        zero.flusher.close()
    next_job = PersistentStore(str(place)).lease("11fe", "job on node9", clock)
    with contextlib.nullcontext() if complete else pytest.raises(LeaseHeldError):
        next_job.ensure()


# --- a missing place -----------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["", "job"])
def test_a_node_that_sees_another_place_writes_nothing_there(
    folder: str, node: MakeNode, place: Path, tmp_path: Path
) -> None:
    """Its mount point is an empty folder on its own disk."""
    unmounted = tmp_path / "mount point"
    unmounted.mkdir()
    zero, one = node(), node(node=1, place=unmounted / folder)
    assert not zero.flush(order(1, 0)).complete
    said = one.flush(order(1, 1))
    assert type(said) is FlushFailed
    assert "is it mounted?" in said.error
    assert list(unmounted.iterdir()) == []
    assert part_of(place, order(1, 0), 0) == 4096


def test_a_node_that_comes_before_the_first_one_gives_no_version_up(
    node: MakeNode, clock: Clock, place: Path
) -> None:
    """Of many nodes some do in every run, and the next version may be ordered at once."""
    zero, one = node(), node(node=1)

    def meanwhile() -> None:
        clock.meanwhile = lambda: None
        one.start(order(2, 1))
        assert not zero.flush(order(1, 0)).complete

    clock.meanwhile = meanwhile
    one.start(order(1, 1))
    one.wait()
    assert [type(said) for said in one.answers] == [Flushed, Flushed]
    assert versions(place) == [1]


def test_a_place_unmounted_in_mid_run_is_not_written_to_until_it_is_back(
    node: MakeNode, place: Path, tmp_path: Path
) -> None:
    """Under the mount is an empty folder on the node's own disk; the first node must notice it,
    too."""
    zero, mounted = node(), tmp_path / "mounted"
    assert zero.flush(order(1)).complete
    place.rename(mounted)
    place.mkdir()
    said = zero.flush(order(2))
    assert type(said) is FlushFailed
    assert "is empty now and had this job's lease: is it not mounted" in said.error
    assert list(place.iterdir()) == []
    place.rmdir()
    mounted.rename(place)
    assert zero.flush(order(3)).complete
    assert versions(place) == [1, 3]


def test_a_place_mounted_in_mid_run_is_written_to(
    node: MakeNode, place: Path, tmp_path: Path
) -> None:
    """The job started before the mount, and never had the lease of the mounted place."""
    zero = node()
    assert zero.flush(order(1)).complete
    place.rename(tmp_path / "beneath")
    place.mkdir()
    (place / "somebody's").mkdir()
    assert zero.flush(order(2)).complete
    assert versions(place) == [2]


def test_versions_that_another_node_never_completes_are_reported(node: MakeNode) -> None:
    zero, one = node(), node(node=1)
    for version in (1, 2, 3, 4):
        assert zero.warnings() == []
        zero.flush(order(version, 0))
    (warning,) = zero.warnings()
    assert warning.startswith("v1 is not complete in ")
    one.flush(order(4, 1))
    for version in (5, 6):
        zero.flush(order(version, 0))
        one.flush(order(version, 1))
    assert len(zero.warnings()) == 1, "all is well again"
    assert one.warnings() == []


def begun(place: Path) -> list[int]:
    """Versions with any file there."""
    store = PersistentStore(str(place))
    return [name.id.version for name in (*store.incomplete(), *store.versions())]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_versions_that_are_never_completed_do_not_fill_the_place(
    failing: int, node: MakeNode, place: Path
) -> None:
    """One of three nodes fails for long; whichever it is, the others remove the unfinished
    files."""
    nodes = [node(node=n) for n in range(3)]
    whole = [having(order(1, n), shards=3) for n in range(3)]
    for n in range(3):
        nodes[n].flush(whole[n])
    for version in range(2, 12):
        for n in {0, 1, 2} - {failing}:
            nodes[n].flush(having(whole[n], id=VersionId(1, version)))
        under_way = set(range(max(2, version - STILL_UNDER_WAY), version + 1))
        assert under_way <= set(begun(place)), "others may be at these"
    left = [version for version in begun(place) if version > 1]
    assert left == list(range(left[0], 12))
    most = STILL_UNDER_WAY + 2 if failing == 0 else STILL_UNDER_WAY + 1
    assert len(left) <= most, left
    assert versions(place) == [1], "existing versions are left alone"
    told = [text for each in nodes for text in each.warnings()]
    assert any("The parts of the version are removed" in text for text in told)
    nodes[failing].flush(having(whole[failing], id=VersionId(1, 11)))
    assert 11 in versions(place)


def test_nodes_take_turns_to_look_for_versions_that_are_never_completed(
    node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node a version later than the one before: listing the place from thousands of nodes at
    one moment would be a heavy load on it."""
    nodes = [node(node=n) for n in range(3)]
    at, first = (0, 0), dict[int, int]()
    incomplete = PersistentStore.incomplete

    def look(store: PersistentStore) -> list[Any]:
        if at[1] > 1:  # all look before their first flush
            first.setdefault(*at)
        return incomplete(store)

    monkeypatch.setattr(PersistentStore, "incomplete", look)
    for version in range(1, 10):
        for number, each in enumerate(nodes):
            at = number, version
            each.flush(having(order(version, number), shards=4))
    assert first == {n: STILL_UNDER_WAY + 2 + n for n in range(3)}


def test_the_bandwidth_is_the_nodes_whatever_the_number_of_flushes(
    node: MakeNode, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each flush is little more than the bytes that may go at once."""
    monkeypatch.setattr(flusher_module, "WINDOW_BYTES", 4096)
    zero, sent = node(bytes_per_second=4096.0), 0
    for version in range(1, 9):
        said = zero.flush(order(version))
        assert said.complete
        sent += said.nbytes
    assert clock.passed() >= (sent - 4096) / 4096
