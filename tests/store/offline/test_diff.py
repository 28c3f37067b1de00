"""`tierckpt diff`: two stored versions compared."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.store.offline.test_offline import flip_byte
from tierckpt import Checkpointer
from tierckpt.cli import Target, run_command, targets_of
from tierckpt.errors import ConfigError
from tierckpt.format import decode_header
from tierckpt.offline import Difference, compare, open_version
from tierckpt.storage import LocalStore, Slot
from tierckpt.testing import ThreadGroup, TinyJob, run_ranks, seed_everything, tiny_model

STEPS = 3
Change = Callable[[TinyJob], None]


@pytest.fixture(autouse=True)
def this_machines_memory(shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERCKPT_SHM_DIR", str(shm_dir))


def make(path: Path, change: Change = lambda job: None, **settings: Any) -> Path:
    """The same job each time, with a change before its last boundary."""
    given = {"agent": "inline", "local_every_steps": 1000, **settings}
    with TinyJob(path, **given) as job:
        job.run(STEPS - 1)
        job.train_one()
        with torch.no_grad():
            change(job)
        job.iteration += 1
        job.checkpointer.step()
    return path


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("plain") / "plain")


def found(a: Path, b: Path, va: int | None = None, vb: int | None = None) -> list[Difference]:
    with ExitStack() as stack:
        opened = [open_version(str(path), v, lambda n: None) for path, v in ((a, va), (b, vb))]
        for each in opened:
            stack.callback(each.close)
        return compare(*opened).differences


# --- differences ---------------------------------------------------------------------------------


def test_files_beside_the_state_are_compared(tmp_path: Path) -> None:
    def routes(content: bytes) -> Change:
        def change(job: TinyJob) -> None:
            with job.checkpointer.files() as f:
                Path(f.route("a/x")).write_bytes(content)

        return change

    one, same, other = (
        make(tmp_path / str(n), routes(bytes([n // 2]) * 9_000_000)) for n in range(3)
    )
    assert found(one, same) == []
    (difference,) = found(one, other)
    assert (difference.name, difference.what) == ("file/a/x", "values")
    assert "9000000 bytes #" in difference.a


def weight(job: TinyJob) -> torch.Tensor:
    tensor: torch.Tensor = job.model.get_parameter("0.weight")
    return tensor


def flip_a_bit(job: TinyJob) -> None:
    weight(job).view(torch.int32)[3, 5] ^= 1


def to_nan(job: TinyJob) -> None:
    weight(job)[0, :2] = torch.tensor([math.nan, math.inf])


def negate_zero(job: TinyJob) -> None:
    state = job.optimizer.state[job.model.get_parameter("4.bias")]
    state["new"] = torch.tensor([0.0, 1.0])


def draw(job: TinyJob) -> None:
    torch.rand(1)


def count_up(job: TinyJob) -> None:
    job.model.get_buffer("1.num_batches_tracked").add_(1)


def schedule_on(job: TinyJob) -> None:
    job.scheduler.last_epoch += 1


def learn_slower(job: TinyJob) -> None:
    job.optimizer.param_groups[0]["lr"] *= 0.5


def widen(job: TinyJob) -> None:
    job.model[1].running_var = job.model[1].running_var.double()  # type: ignore[index]


def lengthen(job: TinyJob) -> None:
    job.model[1].running_var = torch.ones(30)  # type: ignore[index]


def in_another_order(job: TinyJob) -> None:
    weight(job).data = weight(job).t().contiguous().t()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda job: None, []),
        (in_another_order, []),
        (flip_a_bit, [("model/0.weight", "values")]),
        (to_nan, [("model/0.weight", "values")]),
        (negate_zero, [("optimizer/4.bias/new", "only in B")]),
        (draw, [("rng/torch", "values")]),
        (count_up, [("buffer/1.num_batches_tracked", "values")]),
        (schedule_on, [("extra/scheduler/last_epoch", "values")]),
        (learn_slower, [("options/optimizer[0]/lr", "values")]),
        (widen, [("buffer/1.running_var", "dtype")]),
        (lengthen, [("buffer/1.running_var", "shape")]),
    ],
)
def test_each_kind_of_difference_is_named_and_no_other(
    change: Change, told: list[tuple[str, str]], plain: Path, tmp_path: Path
) -> None:
    differences = found(plain, make(tmp_path / "other", change))
    assert [(each.name, each.what) for each in differences] == told


def test_figures(plain: Path, tmp_path: Path) -> None:
    """Compare in float64, over values that are finite on both sides."""
    (bit,) = found(plain, make(tmp_path / "bit", flip_a_bit))
    numbers = bit.numbers
    assert numbers is not None
    assert (numbers.elements, numbers.differing, numbers.nans, numbers.infs) == (
        (288, 1, (0, 0), (0, 0))
    )
    assert 0 < (numbers.max_absolute or 0) < 1e-6
    assert numbers.norm == numbers.max_absolute
    (odd,) = found(plain, make(tmp_path / "nan", to_nan))
    assert odd.numbers is not None
    assert (odd.numbers.differing, odd.numbers.max_absolute) == (2, 0.0)
    assert (odd.numbers.nans, odd.numbers.infs) == ((0, 1), (0, 1))
    (count,) = found(plain, make(tmp_path / "count", count_up))
    assert count.numbers is not None
    assert (count.numbers.differing, count.numbers.norm) == (1, None)


def test_norms_are_those_of_torch(tmp_path: Path) -> None:
    """Over several chunks and blocks, in every kind of number."""
    torch.manual_seed(1)
    kinds = (torch.bfloat16, torch.float64, torch.complex64, torch.int16)
    a, b = ([torch.randn(600_000).mul(50).to(kind) for kind in kinds] for _ in range(2))

    def with_buffers(values: list[torch.Tensor]) -> Change:
        def change(job: TinyJob) -> None:
            for number, value in enumerate(values):
                job.model.register_buffer(f"large{number}", value)

        return change

    differences = found(*(make(tmp_path / str(i), with_buffers(v)) for i, v in enumerate((a, b))))
    assert [each.name for each in differences] == [f"buffer/large{i}" for i in range(4)]
    for each, x, y in zip(differences, a, b, strict=True):
        numbers = each.numbers
        assert numbers is not None
        assert (numbers.elements, numbers.differing) == (600_000, int((x != y).sum()))
        if x.dtype is torch.int16:
            assert numbers.norm is None
            continue
        wide = torch.complex128 if x.dtype.is_complex else torch.float64
        change = (y.to(wide) - x.to(wide)).abs()
        assert numbers.norm == pytest.approx(float(change.norm()), rel=1e-12)
        assert numbers.max_absolute == float(change.max())
        assert numbers.norm_relative == pytest.approx(float(change.norm() / x.to(wide).norm()))


def test_shards_with_equal_checksums_are_not_read(plain: Path, tmp_path: Path) -> None:
    read: list[int] = []
    with ExitStack() as stack:
        opened = [open_version(str(p), None, read.append) for p in (plain, plain)]
        for each in opened:
            stack.callback(each.close)
        assert compare(*opened).equal
    assert read == []


# --- of several ranks ----------------------------------------------------------------------------


def again_on(ranks: int, path: Path, source: Path) -> Path:
    """Restore the version at `source` and save it on this number of ranks."""
    seed_everything(0)
    jobs = []
    for _ in range(ranks):
        model = tiny_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        jobs.append((model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.7)))
    shutil.copytree(source, path)

    def program(group: ThreadGroup) -> None:
        model, optimizer, scheduler = jobs[group.rank]
        extra = {"scheduler": scheduler}
        settings: dict[str, Any] = {"agent": "inline", "path": path, "local_every_steps": 1000}
        with Checkpointer(model, optimizer, group=group, extra=extra, **settings) as ckpt:
            ckpt.restore(strict=False)
            if group.rank == 1:
                model.get_buffer("1.running_mean").add_(1)
            ckpt.save(now=True)

    run_ranks(ranks, program)
    return path


def test_other_numbers_of_ranks(plain: Path, tmp_path: Path) -> None:
    """Tensors are compared as a whole; each rank's own state is compared if both have that rank."""
    two = again_on(2, tmp_path / "two", plain)
    names = {each.name: each for each in found(plain, two)}
    # The generators are of one process here, and the job has no loader of its own.
    names = {name: each for name, each in names.items() if not name.startswith("rng/")}
    own = names.pop("each rank's own state")
    assert (own.what, own.ranks) == ("only in B", (1,))
    assert {name.split("/")[0] for name in names} == {"extra_per_rank"}
    changed = found(plain, again_on(2, tmp_path / "changed", make(tmp_path / "bit", flip_a_bit)))
    (bit,) = (each for each in changed if each.name.startswith("model/"))
    assert (bit.name, bit.numbers and bit.numbers.differing) == ("model/0.weight", 1)


def test_a_ranks_own_buffer_is_named_with_its_rank(plain: Path, tmp_path: Path) -> None:
    two = again_on(2, tmp_path / "two", plain)
    more = again_on(2, tmp_path / "more", two)
    (own,) = (each for each in found(two, more) if each.name.startswith("buffer/"))
    assert (own.name, own.ranks) == ("buffer/1.running_mean", (1,))


# --- the command ---------------------------------------------------------------------------------


def diff(*arguments: object) -> int:
    return run_command(["diff", *map(str, arguments)])


def test_the_exit_status_is_that_of_diff(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make(tmp_path / "other", flip_a_bit)
    assert diff(plain, plain) == 0
    assert "equal, bit for bit: 27 tensors" in capsys.readouterr().out
    assert diff(plain, f"{other}@{STEPS}") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "1 of 27 tensors differ, and 0 other values"
    assert lines[4].split()[:4] == ["model/0.weight", "1", "of", "288"]
    assert diff(plain, f"{other}@77") == 2
    assert f"no v77 is complete and sound; there are shards of v{STEPS}" in (
        capsys.readouterr().err
    )
    assert diff(plain) == 2
    assert "give two versions" in capsys.readouterr().err


def test_two_versions_of_one_job_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make(tmp_path / "job", local_every_steps=1, local_keep=STEPS)
    assert diff(path, 1, 2, "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["equal"], told["a"]["version"], told["b"]["version"]) == (False, 1, 2)
    rows = {row["name"]: row for row in told["differences"]}
    assert rows["model/0.weight"]["norm"] > 0
    assert rows["extra/scheduler/last_epoch"]["b"] == "2"
    assert diff(path, 3) == 0  # and the newest, which it is
    capsys.readouterr()
    assert diff(path, 1, 3) == 1
    assert "more; --all shows them" in capsys.readouterr().out
    assert diff(path, 1, 3, "--all") == 1
    assert "rng/torch" in capsys.readouterr().out


def test_a_persistent_copy_and_one_in_memory(tmp_path: Path) -> None:
    far = tmp_path / "far"
    near = make(tmp_path / "near", persistent_path=str(far), persistent_every_steps=STEPS)
    assert diff(near, far) == 0
    job = TinyJob(tmp_path / "killed", agent="inline", local_every_steps=1000)
    job.run(STEPS).checkpointer.complete()
    job.checkpointer.abandon()
    assert diff(near, tmp_path / "killed") == 0
    encoded = make(tmp_path / "encoded", local_codecs="zstd")
    assert diff(near, encoded) == 0


def where_the_weight_is(shard: bytes | memoryview) -> int:
    header = decode_header(shard)
    return header.header_bytes + next(
        piece.offset for piece in header.pieces if piece.spec.name == "model/0.weight"
    )


def test_damaged_shards_are_not_compared(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make(tmp_path / "other", flip_a_bit)
    (key,) = LocalStore(other).keys()
    shard = other / f"{key.stem}.safetensors"
    flip_byte(shard, where_the_weight_is(shard.read_bytes()))
    assert diff(plain, other) == 2
    assert "differ from their checksum" in capsys.readouterr().err


def test_another_copy_is_compared_in_the_place_of_a_damaged_one(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = TinyJob(tmp_path / "job", agent="inline")
    job.run(STEPS - 1)
    with torch.no_grad():
        flip_a_bit(job)
    job.run(STEPS).settle()
    job.checkpointer.abandon()
    slots = [Slot.open(path) for path, seal in job.checkpointer._resources.job.sealed()]
    for slot in filter(None, slots):
        with closing(slot), slot.image() as image:
            image[where_the_weight_is(image)] ^= 1
    assert diff(plain, tmp_path / "job", "--json") == 1
    assert json.loads(capsys.readouterr().out)["b"]["levels"] == {"local": 1}


def test_versions_are_named_as_people_do(tmp_path: Path) -> None:
    assert targets_of(["a@1", "b@2"]) == (Target("a", 1), Target("b", 2))
    assert targets_of(["a@v1", "b@v2"]) == (Target("a", 1), Target("b", 2))
    assert targets_of(["a", "v1", "2"]) == (Target("a", 1), Target("a", 2))
    assert targets_of(["a", "1"]) == (Target("a", 1), Target("a", None))
    assert targets_of(["s3://u@h/b", "s3://u@h/b@3"]) == (
        (Target("s3://u@h/b", None), Target("s3://u@h/b", 3))
    )
    (tmp_path / "of@2024").mkdir()
    assert targets_of([f"{tmp_path}/of@2024", "b"])[0] == Target(f"{tmp_path}/of@2024", None)
    for wrong in (["a"], ["a", "b", "c"], ["a@1", "2"], ["a@1", "2", "3"], ["a", "1", "2", "3"]):
        with pytest.raises(ConfigError):
            targets_of(wrong)
