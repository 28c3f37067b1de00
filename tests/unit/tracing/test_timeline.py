"""The timeline: clocks, interval arithmetic, and numbers that can be computed by hand."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierckpt.tracing import (
    Interval,
    Span,
    Stats,
    Timeline,
    TimelineError,
    agreement,
    hidden,
    intersection,
    lanes,
    length,
    overlap,
    read_entries,
    read_horovod,
    size_buckets,
    summarize,
    union,
    update_gaps,
    write_traces,
)

# --- intervals -----------------------------------------------------------------------------------

INTERVALS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda i: (i[0], i[0] + i[1])),
    max_size=12,
)


def points(intervals: list[Interval]) -> set[int]:
    """Brute force: every covered unit of time."""
    return {p for first, end in intervals for p in range(first, end)}


@given(INTERVALS)
def test_a_union_covers_the_same_points_and_is_disjoint(intervals: list[Interval]) -> None:
    found = union(intervals)
    assert points(found) == points(intervals)
    assert length(found) == len(points(intervals))
    assert all(one[1] < other[0] for one, other in pairwise(found))


@given(INTERVALS, INTERVALS)
def test_an_intersection_is_the_time_that_both_cover(
    one: list[Interval], other: list[Interval]
) -> None:
    found = intersection(union(one), union(other))
    assert points(found) == points(one) & points(other)
    assert length(found) == len(points(found))


@given(INTERVALS, INTERVALS)
def test_an_overlap_counts_every_interval_by_itself(
    copies: list[Interval], cover: list[Interval]
) -> None:
    expected = sum(p in points(cover) for first, end in copies for p in range(first, end))
    assert overlap(copies, union(cover)) == expected


@given(INTERVALS)
def test_in_a_lane_nothing_overlaps_and_no_lane_is_wasted(intervals: list[Interval]) -> None:
    ordered = sorted(i for i in intervals if i[0] < i[1])
    chosen = lanes(ordered)
    for lane in set(chosen):
        members = [i for i, k in zip(ordered, chosen, strict=True) if k == lane]
        assert all(one[1] <= other[0] for one, other in pairwise(members))
    busiest = max((sum(b <= p < e for b, e in ordered) for p in points(ordered)), default=0)
    assert len(set(chosen)) == busiest


# --- a hand-made timeline ------------------------------------------------------------------------


def step(rank: int, version: int, at: int) -> list[Span]:
    """One step in 1000 microseconds; see the comments."""

    def span(kind: str, first: int, end: int, **more: Any) -> Span:
        return Span(kind, rank, at + first, at + end, kind, version=version, **more)

    return [
        span("boundary", 0, 50),
        span("release", 400, 400, layers=("b",)),
        span("allreduce", 400, 600, nbytes=4096, layers=("b",), row="allreduce"),
        span("release", 500, 500, layers=("a",)),
        span("allreduce", 500, 700, nbytes=100, layers=("a",), row="allreduce"),
        span("copy", 100, 200, nbytes=10),  # before backward
        span("copy", 450, 550, nbytes=10),  # under backward and communication
        span("copy", 650, 750, nbytes=10),  # half under communication, all under backward
        span("barrier", 780, 880),
        span("copy", 780, 880, nbytes=10),  # in the barrier: nothing hides it
        span("update", 900, 1000),
    ]


@pytest.fixture
def timeline() -> Timeline:
    found = Timeline()
    for rank in (0, 1):
        found.add([Span("begin", rank, 0, 0)])
        for version in range(3):
            found.add(step(rank, version, 1_000_000 + 1000 * version + 10 * rank))
    return found


def test_the_share_of_hidden_copying(timeline: Timeline) -> None:
    one = hidden(timeline, 0)
    assert one.copy_us == 3 * 400
    assert one.communication_us == one.moving_us == 3 * (100 + 50)
    assert one.backward_us == 3 * 200
    assert one.computing_us == 3 * 300
    both = summarize(timeline).hidden
    assert both.copy_us == 2 * one.copy_us
    assert both.share(both.computing_us) == 0.75


def test_the_rank_tree_is_copied_too(timeline: Timeline) -> None:
    """It may be as large as the model, so its visible part must be counted."""
    timeline.add([Span("tree", 0, at, at + 30) for at in (1_000_350, 1_000_800)])
    one = hidden(timeline, 0)
    assert (one.copy_us, one.computing_us) == (3 * 400 + 60, 3 * 300 + 30)
    assert summarize(timeline).durations["tree"] == Stats(2, 30, 30.0, 30)


def test_gaps_between_updates_separate_runs(timeline: Timeline) -> None:
    assert list(update_gaps(timeline, 0)) == [900, 900]
    timeline.add([Span("begin", 0, 1_002_100, 1_002_100)])
    assert list(update_gaps(timeline, 0)) == [900]
    assert summarize(timeline).gaps == Stats(3, 900, 900.0, 900)


def test_a_step_that_a_crash_cut_short_hides_nothing(timeline: Timeline) -> None:
    cut = Timeline()
    cut.add(s for s in step(0, 0, 0) if s.kind not in ("barrier", "update"))
    cut.add([Span("begin", 0, 5000, 5000)])
    cut.add(s for s in step(0, 1, 6000) if s.kind not in ("boundary", "release"))
    assert hidden(cut, 0).backward_us == hidden(cut, 0).computing_us == 0


def test_sizes_and_latencies() -> None:
    def of(nbytes: int, first: int, launched: int | None = None) -> Span:
        return Span("allreduce", 0, first, 1000, nbytes=nbytes, launched_us=launched)

    spans = [of(0, 900), of(1024, 700), of(1025, 500), of(4096, 500, 100), of(70_000, 0)]
    found = list(size_buckets(spans))
    assert [(b.above_bytes, b.upto_bytes) for b in found] == [
        (0, 1024),
        (1024, 4096),
        (65536, 262144),
    ]
    assert [b.latency for b in found] == [
        Stats(2, 100, 200.0, 300),
        Stats(2, 500, 700.0, 900),
        Stats(1, 1000, 1000.0, 1000),
    ]
    assert found[1].moving == Stats(2, 500, 500.0, 500)


def test_counts_and_durations(timeline: Timeline) -> None:
    found = summarize(timeline)
    assert (found.ranks, found.steps) == (2, 3)
    assert found.durations["boundary"] == Stats(6, 50, 50.0, 50)
    assert found.durations["copy"].count == 24
    assert found.durations["write"].count == 0
    assert sum(b.latency.count for b in found.buckets) == 12


def test_nothing_at_all_is_all_zero() -> None:
    found = summarize(Timeline())
    assert (found.ranks, found.hidden.share(0), found.buckets) == (0, 0.0, ())


# --- merged --------------------------------------------------------------------------------------


def test_merged_every_rank_has_its_rows_and_nothing_is_lost(
    timeline: Timeline, tmp_path: Path
) -> None:
    write_traces(timeline, tmp_path / "out.json")
    content = json.loads((tmp_path / "out.json").read_text())
    events = [e for e in content["traceEvents"] if e["ph"] != "M"]
    named = [e for e in content["traceEvents"] if e["name"] == "thread_name"]
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in named}
    assert len(events) == len(timeline.of())
    assert min(e["ts"] for e in events) == 0
    for rank in (0, 1):
        mine = [e for e in events if e["pid"] == rank]
        # The two allreduces of a step overlap, and so have a row each.
        lanes_used = {rows[rank, e["tid"]] for e in mine if e["cat"] == "allreduce"}
        assert lanes_used == {"allreduce", "allreduce 2"}
        assert {rows[rank, e["tid"]] for e in mine if e["cat"] == "update"} == {"training"}
    assert list(tmp_path.iterdir()) == [tmp_path / "out.json"]


def test_a_rank_without_allreduces_is_shown_those_of_rank_0(tmp_path: Path) -> None:
    found = Timeline()
    found.add(step(0, 0, 0))
    found.add(s for s in step(1, 0, 0) if s.kind != "allreduce")
    write_traces(found, tmp_path / "out.json")
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    assert [e["pid"] for e in events if e.get("cat") == "allreduce"] == [0, 0, 1, 1]
    assert hidden(found, 1).communication_us == 150
    assert sum(b.latency.count for b in summarize(found).buckets) == 2  # counted once


@pytest.mark.parametrize(
    ("releases", "launched"),
    [
        ([], 100),  # what Horovod says
        ([50], 100),  # this rank was the first, and noted it at once
        ([150], 150),
        ([20, 150], 150),  # the last of several steps
        ([250], 200),  # noted when data was moving already
        ([150, 400], 150),  # the next step's is none of its
    ],
)
def test_an_allreduce_is_launched_when_the_rank_asked(releases: list[int], launched: int) -> None:
    found = Timeline()
    found.add([Span("allreduce", 0, 200, 300, layers=("a",), launched_us=100)])
    found.add(Span("release", 1, t, t, layers=("a",)) for t in releases)
    assert [s.launched_us for s in found.communication(1)] == [launched]
    # Counted for all ranks, it lasts from the first one's asking.
    assert summarize(found).buckets[0].latency.max_us == 200


def test_a_merge_into_a_missing_folder_is_reported(timeline: Timeline, tmp_path: Path) -> None:
    with pytest.raises(TimelineError, match=r"cannot write .*nowhere/out.json: No such file"):
        write_traces(timeline, tmp_path / "nowhere" / "out.json")


# --- files as they are found ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[\n", 0),
        ("[]", 0),
        ('[{"a":1}]', 1),
        ('[{"a":1},{"a":2},\n', 2),
        ('[{"a":1},{"a":[2,{"b":', 1),
        ('[{"a":1},{"a":"x}', 1),
        ('[{"a":1},{"a":"x\\', 1),
        ('[{"a":1},{"a":1', 1),
    ],
)
def test_the_records_of_a_written_array_are_read(text: str, expected: int, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(text)
    assert len(list(read_entries(tmp_path / "t.json"))) == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[{"a":1},{"a":,},{"a":2}]', "is damaged at character 9"),
        ('[{"a":1},}', "is damaged at character 9"),
        ('{"a":1}', "is not a trace: it does not start as"),
        ("", "is not a trace: it does not start as"),
        ("[1, 2]", "is not a trace: the entry before character 2 is 1"),
    ],
)
def test_an_invalid_trace_is_refused_by_name(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(TimelineError, match=f"bad.json {problem}"):
        list(read_entries(tmp_path / "bad.json"))


# --- Horovod -------------------------------------------------------------------------------------

START_US = 1_700_000_000_000_000


class HorovodFile:
    """A timeline as Horovod 0.28 writes it."""

    def __init__(self) -> None:
        start = {"start_time_since_epoch_in_micros": START_US}
        self.entries: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", "pid": 0, "args": start}
        ]
        self.tensors: dict[str, int] = {}

    def allreduce(
        self, tensor: str, asked: int, first: int, end: int, what: str = "ALLREDUCE"
    ) -> None:
        """With an inner activity, as Horovod writes it."""
        if tensor not in self.tensors:
            self.tensors[tensor] = len(self.tensors) + 1
            meta = {"name": "process_name", "ph": "M", "pid": self.tensors[tensor]}
            self.entries.append({**meta, "args": {"name": tensor}})
        pid = self.tensors[tensor]
        self.entries += [
            {"ph": "B", "name": f"NEGOTIATE_{what}", "ts": asked, "pid": pid},
            {"ph": "X", "name": "0", "ts": asked + 1, "pid": pid, "dur": 0},
            {"ph": "E", "ts": first, "pid": pid},
            {"ph": "B", "name": what, "ts": first, "pid": pid},
            {"ph": "B", "name": f"GLOO_{what}", "ts": first, "pid": pid},
            {"ph": "E", "ts": end, "pid": pid},
            {"ph": "E", "ts": end, "pid": pid, "args": {"dtype": "float32", "shape": "[8, 3]"}},
        ]

    def save(self, path: Path) -> Path:
        # A barrier has an end without a start, and a marker of a cycle has no tensor.
        self.entries.append({"ph": "E", "ts": 9, "pid": 99})
        self.entries.append({"ph": "i", "name": "CYCLE_START", "ts": 9, "s": "g"})
        path.write_text("[\n" + ",".join(map(json.dumps, self.entries)) + "]")
        return path


def test_a_timeline_of_horovod_is_put_into_unix_time(tmp_path: Path) -> None:
    file = HorovodFile()
    file.allreduce("allreduce.a.weight", 100, 150, 400)
    file.allreduce("allreduce.tierckpt.vote.3", 100, 150, 400)
    negotiate, allreduce = read_horovod(file.save(tmp_path / "h.json"))
    assert (negotiate.kind, negotiate.start_us, negotiate.us) == ("negotiate", START_US + 100, 50)
    assert (allreduce.kind, allreduce.start_us, allreduce.us) == ("allreduce", START_US + 150, 250)
    assert (allreduce.latency_us, allreduce.nbytes) == (300, 96)
    assert allreduce.layers == ("a.weight",)


NAMES = {
    "grouped_allreduce.a_2of2": ["b"],
    "allreduce.noname.0.1": ["generator.w", "critic.w"],
    "allgather.table.indices": ["table"],
}
"""As a trace contains them."""


@pytest.mark.parametrize(
    ("tensor", "layers"),
    [
        ("grouped_allreduce.a_2of2", ("b",)),
        ("allreduce.noname.0.1", ("generator.w", "critic.w")),  # two optimizers, alternating
        ("allreduce.by hand a", ("by hand a",)),
        ("grouped_allreduce.other_1of3", ("grouped_allreduce.other_1of3",)),
        ("mine", ("mine",)),
    ],
)
def test_tensors_belong_to_the_layers_that_the_traces_name(
    tensor: str, layers: tuple[str, ...], tmp_path: Path
) -> None:
    file = HorovodFile()
    file.allreduce(tensor, 1, 2, 3)
    found = read_horovod(file.save(tmp_path / "h.json"), NAMES)
    assert [(s.kind, s.layers) for s in found] == [("negotiate", layers), ("allreduce", layers)]


def test_gathers_are_reductions_where_they_are_of_sparse_gradients(tmp_path: Path) -> None:
    file = HorovodFile()
    file.allreduce("allgather.table.indices", 100, 150, 400, "ALLGATHER")
    file.allreduce("allgather.tierckpt.sizes", 100, 150, 400, "ALLGATHER")
    negotiate, reduction = read_horovod(file.save(tmp_path / "h.json"), NAMES)
    assert (negotiate.kind, negotiate.layers) == ("negotiate", ("table",))
    assert (reduction.kind, reduction.us, reduction.nbytes) == ("allreduce", 250, 96)


@pytest.mark.parametrize(
    ("dtype", "nbytes"),
    [("float16", 48), ("bfloat16", 48), ("float64", 192), ("uint8", 24), ("bool", 24)],
)
def test_bytes_by_type(dtype: str, nbytes: int, tmp_path: Path) -> None:
    file = HorovodFile()
    file.allreduce("allreduce.a", 1, 2, 3)
    file.entries[-1]["args"]["dtype"] = dtype
    assert read_horovod(file.save(tmp_path / "h.json"))[1].nbytes == nbytes


def test_without_its_start_a_timeline_is_of_no_use(tmp_path: Path) -> None:
    (tmp_path / "h.json").write_text('[{"ph": "M", "pid": 0, "name": "process_name", "args": {}}]')
    with pytest.raises(TimelineError, match=r"h.json has no start time"):
        read_horovod(tmp_path / "h.json")


def fitted(tmp_path: Path, shift_us: int) -> Any:
    """Ten steps in both files, with a difference of `shift_us` between the clocks."""
    file = HorovodFile()
    timeline = Timeline()
    timeline.add([Span("begin", 0, START_US, START_US)])
    for turn in range(10):
        at = 1000 * turn
        for layer, launch in (("b", 400), ("a", 500)):
            instant = START_US + at + launch
            timeline.add([Span("release", 0, instant, instant, layers=(layer,))])
            asked = at + launch + 20 + shift_us
            file.allreduce(f"allreduce.{layer}", asked, asked + 30, asked + 200)
        timeline.add([Span("update", 0, START_US + at + 850, START_US + at + 1000)])
    timeline.add(read_horovod(file.save(tmp_path / "h.json")))
    return agreement(timeline)


def test_the_order_of_events_bounds_how_far_clocks_are_apart(tmp_path: Path) -> None:
    fit = fitted(tmp_path, 0)
    # The first update has none before it; so nine steps of two layers.
    assert (fit.expected, fit.missing) == (18, 0)
    assert fit.late_us == 400 + 20 + 30
    assert fit.early_us == 850 - (500 + 20 + 200)
    assert fit.delay_us == 50
    assert fit.plausible


@pytest.mark.parametrize(
    ("shift_us", "plausible"), [(-440, True), (120, True), (-600, False), (200, False)]
)
def test_clocks_that_differ_by_more_are_found_out(
    shift_us: int, plausible: bool, tmp_path: Path
) -> None:
    fit = fitted(tmp_path, shift_us)
    assert fit.plausible is plausible
    if plausible:
        assert -fit.early_us <= 0 <= fit.late_us
        assert fit.delay_us == 50 + shift_us


def test_only_the_last_run_is_compared(tmp_path: Path) -> None:
    timeline = Timeline()
    timeline.add(
        s for turn in range(3) for s in step(0, turn, 1000 * turn) if s.kind != "allreduce"
    )
    timeline.add([Span("begin", 0, 1_000_000, 1_000_000)])
    assert agreement(timeline).expected == 0
    assert "cannot be compared" in agreement(timeline).text()
