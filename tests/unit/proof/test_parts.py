"""Parts of `tierckpt prove` that start no job: orders, records, verdicts, leftovers of a run."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest

from tierckpt.cli import run_command
from tierckpt.config import load_config
from tierckpt.coordination import PROOF_VARIABLE, ProofOrder, order_here, path_of, redirected
from tierckpt.errors import ConfigError
from tierckpt.proof import (
    Departure,
    IncomparableError,
    ProveError,
    RankRun,
    Run,
    Writer,
    cause,
    departure,
    description,
    read_records,
)

# --- orders --------------------------------------------------------------------------------------


@pytest.fixture
def order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProofOrder:
    made = ProofOrder(tmp_path / "run", until=9, keep=2, kill_at=5)
    made.write()
    monkeypatch.setenv(PROOF_VARIABLE, str(made.folder))
    return made


def test_an_order_is_found_by_its_job(order: ProofOrder) -> None:
    assert order_here() == order


def test_without_one_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PROOF_VARIABLE, raising=False)
    config = load_config({"path": "/data/ckpts"})
    assert order_here() is None
    assert redirected(config) is config


def test_all_output_of_a_script_goes_to_the_folder_of_the_run(order: ProofOrder) -> None:
    given = {
        "path": "/data/{node}/ckpts",
        "job_id": "mine",
        "persistent_path": "s3://bucket/mine",
        "persistent_keep": 7,
        "events_dir": "/data/events",
        "trace_dir": "/data/trace",
        "peer_redundancy": "xor",
        "memory_every_steps": 0,
        "memory_every_seconds": 5.0,
        "local_codecs": "zstd",
        "halt_seconds_left": 60.0,
        "stages": "mirror /disk2",
    }
    config = redirected(load_config(given))
    places = (config.path, config.events_dir)
    assert all(Path(place).is_relative_to(order.folder) for place in places)
    assert path_of(config.path) == "/data/{node}/ckpts"
    assert config.path.endswith("{node}")
    assert (config.job_id, config.trace_dir, config.persistent.path) == ("", "", "")
    assert config.stages == ""
    assert (config.memory.every_steps, config.uses("local"), config.uses("peer")) == (
        (1, True, False)
    )
    assert config.local.codecs == "zstd"  # a required key
    assert config.idle == []
    assert config.halt_seconds_left == 0.0
    other = redirected(load_config({"path": "/data/others"}))
    assert other.path != config.path
    assert redirected(load_config(given)).path == config.path


@pytest.mark.parametrize("content", [None, "", "{}", '{"until": "x", "keep": 1, "kill_at": 1}'])
def test_a_job_with_an_unreadable_order_does_not_start(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would write to the user's checkpoints."""
    monkeypatch.setenv(PROOF_VARIABLE, str(tmp_path))
    if content is not None:
        (tmp_path / "order.json").write_text(content)
    with pytest.raises(ConfigError, match="no order of `tierckpt prove` can be read"):
        redirected(load_config({"path": "/data/ckpts"}))


@pytest.mark.parametrize("path", ["/data/a", "/data/{node}/a"])
def test_a_seed_is_the_first_checkpointers(path: str, order: ProofOrder) -> None:
    (order.folder / "seed").mkdir()
    (order.folder / "seed" / "file").touch()
    first, second = (redirected(load_config({"path": p})).directory for p in (path, "/data/b"))
    assert os.listdir(first) == ["file"]
    assert not Path(second).exists()


# --- records and verdicts ------------------------------------------------------------------------

SAME = {"model/0.weight": "float32[2] #aa", "options/opt[0]/lr": "float 0.1", "rng/torch": "#1"}


def attached(writer: Writer, rank: int = 0, ranks: int = 1) -> None:
    identity = {"rank": rank, "ranks": ranks, "path": "/data/ckpts", "place": "/x", "memory": "/m"}
    writer.line("attached", **identity)


def runs(folder: Path, *states: dict[str, str]) -> dict[int, RankRun]:
    """Runs of one rank, with a version for each of these states, numbered from 1."""
    (folder / "records").mkdir(parents=True)
    writer = Writer(folder, "job", 0)
    attached(writer)
    for version, state in enumerate(states, 1):
        writer.state(version, state)
    return read_records(folder)["job"].by_rank()


def test_runs_are_separated_and_a_torn_line_is_ignored(order: ProofOrder) -> None:
    writer = Writer(order.folder, "job", 0)
    attached(writer)
    writer.line("restored", version=0)
    writer.state(1, SAME)
    writer.line("killed", version=2)
    path = order.folder / "records" / "job.r00000.jsonl"
    with path.open("ab") as file:
        file.write(b'{"kind":"state","version":2,"digest":"00","st')
    assert [run.last for run in read_records(order.folder)["job"].runs[0]] == [1]
    path.write_bytes(path.read_bytes().rpartition(b"\n")[0] + b"\n")
    attached(writer)
    writer.line("restored", version=1)
    writer.state(2, {})
    first, second = read_records(order.folder)["job"].runs[0]
    assert (first.restored, first.killed, first.last) == (0, 2, 1)
    assert first.states[1].load() == SAME
    assert (second.restored, second.killed, second.last) == (1, None, 2)
    assert read_records(order.folder)["job"].reached(2)
    attached(Writer(order.folder, "job", 1), 1, 2)
    assert not read_records(order.folder)["job"].reached(2)


def test_the_first_version_that_differs_is_found(tmp_path: Path) -> None:
    changed = {**SAME, "options/opt[0]/lr": "float 0.2", "model/0.weight": "float32[2] #bb"}
    one = runs(tmp_path / "one", SAME, SAME, SAME)
    other = runs(tmp_path / "other", SAME, changed, changed)
    assert departure(one, one, [1, 2, 3]) is None
    found = departure(one, other, [1, 2, 3])
    assert found is not None
    assert (found.version, found.names, found.of) == (
        (2, ("model/0.weight", "options/opt[0]/lr"), 3)
    )
    assert description(found) == "2 of 3 names: model/0.weight, options/opt[0]/lr (0.1 and 0.2)"


def test_an_option_is_named_before_many_weights() -> None:
    weights = tuple(f"model/{i}" for i in range(6))
    name = "options/opt[0]/lr"
    found = Departure(2, (*weights, name), (0,), {name: ("float 0.1", "float 0.2")}, 9)
    assert description(found).startswith("7 of 9 names: options/opt[0]/lr (0.1 and 0.2), model/0,")


def test_a_tensor_in_one_run_only_differs_and_parts_of_a_tensor_are_one_name(
    tmp_path: Path,
) -> None:
    one = runs(tmp_path / "one", {"model/w[0:5]": "float32[9] #a", "model/w[5:9]": "#b"})
    other = runs(tmp_path / "other", {"model/w[0:5]": "float32[9] #c", "extra/x": "int 3"})
    found = departure(one, other, [1])
    assert found is not None
    assert (found.names, found.of) == (("model/w", "extra/x"), 1)
    assert found.values == {"extra/x": ("not there", "int 3")}


def test_a_value_that_was_not_recorded_is_not_called_equal(tmp_path: Path) -> None:
    one, other = runs(tmp_path / "one", SAME), runs(tmp_path / "other", SAME)
    with pytest.raises(IncomparableError, match="rank 0 recorded no version 2"):
        departure(one, other, [1, 2])
    with pytest.raises(IncomparableError, match="different numbers of ranks: 1 and 0"):
        departure(one, {}, [1])


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("model/w", "optimizer/w/exp_avg"), "it used other data"),
        (("buffer/b",), "it used other data"),
        (("options/opt[0]/lr",), "a scheduler starts again"),
        (("options/opt[0]/lr", "extra/schedule/last_epoch"), "a scheduler starts again"),
        (("model/w", "options/opt[0]/lr"), "a scheduler that steps at the end of an epoch"),
        (("model/w", "rng/torch", "options/opt[0]/lr"), "The random stream of torch is"),
        (("model/w", "rng/torch"), "The random stream of torch is"),
        (("rng/numpy", "rng/python"), "The random stream of numpy and python is"),
        (("rng/torch",), "a DataLoader draws from torch's"),
        (("rng/numpy",), "numpy.random shuffles"),
        (("rng/cuda[0]",), "The random stream of cuda[0] is"),
        (("extra/scaler/scale", "extra_per_rank/loader/at"), "Only extra/scaler, extra_per_rank/"),
        (("metric",), "the metric given to step() is not"),
        (("options/optimizer[0]/lr",), "for i, batch in enumerate(data, data.start)"),
        (("options/optimizer[0]/lr", "model/a"), "counts batches, from 0 after a restart"),
        (("extra/ema/a",), "the decay of an average"),
        (("adapter/x",), "none of the usual ones"),
    ],
)
def test_the_usual_causes_are_named(names: tuple[str, ...], said: str) -> None:
    assert said in cause(Departure(3, names, (0,)))


def test_if_a_loader_was_given_a_generator_of_the_script_is_the_first_cause() -> None:
    names = ("model/weight",)
    said = "the step drew from a generator of the script's own (random.Random()"
    assert said in cause(Departure(3, names, (0,), has_loader=True)).partition("Or ")[0]
    assert "it used other data" in cause(Departure(3, names, (0,))).partition("Or ")[0]


def test_a_loader_of_accelerate_that_was_not_resumed_is_the_usual_cause() -> None:
    objects = frozenset(["extra/accelerator", "extra_per_rank/loader0"])
    for names in (("model/w",), ("model/w", "rng/torch")):
        bare = Departure(3, names, (0,), objects=objects - {"extra_per_rank/loader0"})
        assert "data = ckpt.resume(loader)" in cause(bare)
        assert "ckpt.resume" not in cause(Departure(3, names, (0,), objects=objects))


# --- the command ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give the command that starts the job"),
        (["--kill-after", "4", "--", "true"], "--kill-after 5 or more"),
        (["--steps", "0", "--", "true"], "--steps must be 1 or more"),
        (["--", "/no/such/program"], "/no/such/program cannot be started"),
        (["--from", "x@y@3", "--", "true"], "x@y is not a directory"),
    ],
)
def test_bad_arguments_are_one_sentence(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["prove", "--dir", str(tmp_path / "proof"), *arguments]) == 2
    assert said in capsys.readouterr().err


DEAF = """
trap '' TERM
echo $$ > pid.new
mv pid.new pid
while :; do sleep 1; done
"""


def test_ranks_that_outlive_their_launcher_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank in its own session that ignores SIGTERM, like a rank that hangs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deaf.sh").write_text(DEAF)
    order = ProofOrder(tmp_path / "run", until=3)
    order.write()

    def interrupt(version: int) -> None:
        while not Path("pid").exists():
            time.sleep(0.01)
        raise KeyboardInterrupt

    command = ("sh", "-c", "setsid sh deaf.sh & wait")
    with pytest.raises(KeyboardInterrupt):
        Run("the run", order, command, 1000.0, on_step=interrupt).carry_out()
    with contextlib.suppress(FileNotFoundError):  # except for a zombie without a waiting parent
        assert ") Z " in Path(f"/proc/{Path('pid').read_text().strip()}/stat").read_text()


def test_the_named_error_is_the_scripts_and_the_newest_launchs(tmp_path: Path) -> None:
    """Not the error of ranks killed earlier, nor that of the launcher about its ranks."""
    order = ProofOrder(tmp_path / "run", until=3)
    order.write()
    told = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "
    (order.folder / "log").write_text(f"BrokenPipeError: of the launch before\n{told}\n")
    report = "E1127 1] torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1)"
    lines = ["[rank1]: RuntimeError: address in use", *["more"] * 20, "its last line"]
    texts = " ".join(f"'{line}'" for line in [*lines, report, told, "of the launcher"])
    run = Run("the run", order, ("sh", "-c", f"printf '%s\\n' {texts}; exit 1"), 1000.0)
    with pytest.raises(ProveError) as caught:
        run.carry_out()
    assert "the first error is '[rank1]: RuntimeError: address in use'" in str(caught.value)
    assert str(caught.value).endswith("its last line")
