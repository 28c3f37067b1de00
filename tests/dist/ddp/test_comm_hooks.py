"""DDP's communication hooks: they give the same results as without us, and resume exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import ddp_ckpt
import tierckpt
from tests.support import comm_hooks
from tests.support.rank_pool import RankPool
from tests.support.training import Job, Place, attach, course_of, make_job, no_boundary

CRASH = 4
END = 7

many_buckets = {"bucket_cap_mb": 0.003}


def power() -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)


Hook = tuple[Callable[[], Any], Any, dict[str, Any]]

HOOKS: dict[str, Hook] = {
    "fp16 compression": (lambda: None, default_hooks.fp16_compress_hook, many_buckets),
    # One bucket: with more, their callbacks use one gloo group in any order, and collide.
    "PowerSGD in fp16": (
        power,
        default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
        {},
    ),
    "a function of the user's": (dict, comm_hooks.sum_of_clamped, many_buckets),
    "built-in fp16": (lambda: None, dist.BuiltinCommHookType.FP16_COMPRESS, many_buckets),
}


def is_built_in(name: str) -> bool:
    return name.startswith("built-in")


def register(model: Any, state: Any, hook: Any) -> None:
    if isinstance(hook, dist.BuiltinCommHookType):
        model._register_builtin_comm_hook(hook)
    else:
        model.register_comm_hook(state, hook)


def ways_of(name: str) -> list[str]:
    """DDP's built-in hooks cannot be given."""
    return [*([] if is_built_in(name) else ["given"]), "registered later", "registered before"]


def trained_with_hook(name: str, place: Place) -> dict[str, Any]:
    """Train with plain DDP, and in all ways to combine a hook and checkpoints."""
    make_state, hook, options = HOOKS[name]
    told = {}
    for way in ("plain", *ways_of(name)):
        job = make_job(**options)
        state = make_state()
        if way in ("plain", "registered before"):
            register(job.model, state, hook)
        course, notices = [], []
        if way == "plain":
            course = [(job.iterate(i), job.digest()) for i in range(END)]
        else:
            given = {"comm_hook": (state, hook)} if way == "given" else {}
            attached = attach(job, Place(f"{place.path} {way}", place.shm), **given)
            if way == "registered later":
                register(job.model, state, hook)
            for iteration in range(END):
                gradients = job.iterate(iteration)
                attached.ckpt.step()
                course.append((gradients, job.digest()))
            attached.ckpt.abandon()
            # Of a built-in hook the newest version may be under way still.
            assert attached.ckpt._log.counts["sealed"] >= END - is_built_in(name)
            said = [e.message for e in attached.events if e.name == "notice"]
            # A busy machine's copies are slow, which is said as well.
            notices = [text for text in said if "does not fit into the backward" not in text]
        calls = state.get("calls") if isinstance(state, dict) else None
        told[way] = (course, calls)
        told[f"notices {way}"] = notices
    return told


def resumed_with_error_feedback(kept: bool, place: Place) -> dict[str, Any]:
    """PowerSGD's undisturbed course, and the course of new objects that resume it."""

    def begin(seed: int) -> tuple[Job, Any, dict[str, Any]]:
        state = power()
        given = {"comm_hook": (state, powerSGD_hook.powerSGD_hook)}
        extra = {"extra_per_rank": {"hook": ddp_ckpt.HookState(state)}} if kept else {}
        return make_job(seed=seed), state, {**given, **extra}

    job, state, _ = begin(1)
    job.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    plain = course_of(job, range(END), no_boundary)
    job, _, settings = begin(1)
    first = attach(job, place, **settings)
    course = course_of(job, range(CRASH), first.ckpt.step)
    job.iterate(CRASH)
    first.ckpt.abandon()
    job, state, settings = begin(2)
    second = attach(job, place, **settings)
    restored = second.ckpt.restore()
    iterations = state.iter
    course |= course_of(job, range(restored, END), second.ckpt.step)
    second.ckpt.close()
    return {
        "same": course == plain,
        "restored": (int(restored), iterations),
        "warned": [e.message for e in first.events if e.severity > 20],
    }


def test_error_feedback_continues_where_it_was(ranks: Any, place: Place) -> None:
    for told in ranks(3).run(resumed_with_error_feedback, True, place):
        assert told == {"same": True, "restored": (CRASH, CRASH), "warned": []}


def test_error_feedback_not_kept_is_reported(pool: RankPool, place: Place) -> None:
    for told in pool.run(resumed_with_error_feedback, False, place):
        assert told["restored"] == (CRASH, 0)
        assert not told["same"]
        (warning,) = told["warned"]
        assert "PowerSGDState, is not in the checkpoints" in warning
        assert "its losses differ" in warning


def hook_state_with_a_static_graph(place: Place) -> str:
    job = make_job(static_graph=True)
    with pytest.raises(tierckpt.ConfigError) as caught:
        attach(job, place, extra_per_rank={"hook": ddp_ckpt.HookState(power())})
    return str(caught.value)


def test_bucket_state_of_a_hook_needs_the_same_buckets(pool: RankPool, place: Place) -> None:
    for text in pool.run(hook_state_with_a_static_graph, place):
        assert "HookState with static_graph=True" in text


def what_is_stored_of_buckets(place: Place) -> dict[str, list[Any]]:
    """For each kind of module, after each of the first passes."""
    stored = {}
    for name in ("plain", "find_unused_parameters", "static_graph", "gradient_as_bucket_view"):
        job = make_job(**many_buckets, **({} if name == "plain" else {name: True}))
        attached = attach(job, Place(f"{place.path} {name}", place.shm))
        stored[name] = []
        for iteration in range(4):
            job.iterate(iteration)
            attached.ckpt.step()
            (of_the_module,) = attached.ckpt.adapter.pack().values()
            stored[name].append(of_the_module["buckets"])
        attached.ckpt.abandon()
    return stored


def test_bucket_state_does_not_depend_on_the_number_of_passes(pool: RankPool, place: Place) -> None:
    """Otherwise `tierckpt prove` would report an exact script as not exact."""
    (told, _) = pool.run(what_is_stored_of_buckets, place)
    for name, orders in told.items():
        assert orders == [orders[0]] * 4, name
    assert len(told["plain"][0]) > 1


@pytest.mark.parametrize("name", HOOKS)
def test_a_users_hook_computes_the_same_with_and_without_checkpoints(
    name: str, ranks: Any, place: Place
) -> None:
    for told in ranks(3 if is_built_in(name) else 2).run(trained_with_hook, name, place):
        for way in ways_of(name):
            assert told[way] == told["plain"], way
        silent = "PowerSGD" not in name and name != "a function of the user's"
        for way in ways_of(name)[:-1]:
            assert len(told[f"notices {way}"]) == (0 if silent else 1)
            assert all("is not in the checkpoints" in text for text in told[f"notices {way}"])
        (notice,) = told["notices registered before"]
        assert "has a communication hook already" in notice


def hook_that_fails_once(place: Place) -> tuple[int, list[str]]:
    job = make_job()
    attached = attach(job, place, comm_hook=({}, comm_hooks.fails_at_the_second_call))
    job.iterate(0)
    attached.ckpt.step()
    with pytest.raises(ZeroDivisionError, match="in the user's hook"):
        job.iterate(1)
    attached.ckpt.abandon()
    job = make_job(seed=2)
    attached = attach(job, place)
    restored = attached.ckpt.restore()
    attached.ckpt.abandon()
    return restored.version, [e.text() for e in attached.events if e.severity > 20]


def test_an_error_in_the_users_hook_comes_out_of_backward_as_it_is(
    pool: RankPool, place: Place
) -> None:
    """Nothing was released at that time, and nothing has changed: version 1 is completed at the
    end."""
    for version, repeated_errors in pool.run(hook_that_fails_once, place):
        assert version == 1
        assert repeated_errors == []


def wrong_annotation(state: Any, bucket: int) -> None:
    """A hook that DDP refuses."""


def wrong_return(state: Any, bucket: Any) -> int:
    """Another hook that DDP refuses."""
    return 0


def no_bucket(state: Any, gradients: Any) -> Any:
    """A hook that DDP refuses, because it looks for the argument by its name."""


def two(model: Any) -> None:
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    model.register_comm_hook(None, comm_hooks.sum_of_clamped)


def two_built_in(model: Any) -> None:
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)


def one_of_each(model: Any) -> None:
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)


def registers(hook: Any) -> Callable[[Any], None]:
    return lambda model: model.register_comm_hook(None, hook)


REGISTERED: dict[str, Callable[[Any], None]] = {
    "nothing": lambda model: None,
    "a function": registers(comm_hooks.sum_of_clamped),
    "built in": lambda m: m._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE),
    "not callable": registers(1),
    "wrong annotation": registers(wrong_annotation),
    "wrong return": registers(wrong_return),
    "no bucket": registers(no_bucket),
    "bf16": registers(default_hooks.bf16_compress_hook),
    "two": two,
    "two built in": two_built_in,
    "one of each": one_of_each,
}


def registered_in_both(place: Place) -> dict[str, list[Any]]:
    """For each hook, the errors of plain DDP and of DDP with a checkpointer, and the name in its
    log."""

    def outcome(job: Job, register: Callable[[Any], None]) -> Any:
        try:
            register(job.model)
        except Exception as error:
            return type(error), str(error).splitlines()[0]
        return job.model._get_ddp_logging_data().get("comm_hook") or ""

    told = {}
    for number, (name, register) in enumerate(REGISTERED.items()):
        plain = outcome(make_job(), register)
        job = make_job()
        attached = attach(job, Place(f"{place.path} {number}", place.shm))
        told[name] = [plain, outcome(job, register)]
        attached.ckpt.abandon()
    return told


def test_it_registers_and_refuses_the_same_hooks_as_ddp(pool: RankPool, place: Place) -> None:
    """The error comes at the same moment, also for a second hook; and the log has the user's
    hook."""
    for told in pool.run(registered_in_both, place):
        assert {name for name, (plain, ours) in told.items() if plain != ours} == set()
        assert told["nothing"] == ["", ""]
        assert told["a function"] == ["sum_of_clamped"] * 2
        assert told["two"][0][0] is RuntimeError


def given_beside_a_registered_one(place: Place) -> list[Any]:
    """Give a hook to a second checkpointer, when the user, in two ways, or only the first
    checkpointer, had set one before; and a hook that DDP refuses."""
    outcomes: list[Any] = []
    for before in ("a function", "built in", "given"):
        job = make_job()
        hook = {"comm_hook": (None, default_hooks.allreduce_hook)}
        given = hook if before == "given" else {}
        first = attach(job, Place(f"{place.path} {before}", place.shm), **given)
        if before != "given":
            REGISTERED[before](job.model)
        first.ckpt.abandon()
        try:
            attach(job, place, **hook).ckpt.abandon()
            outcomes.append(job.model._get_ddp_logging_data()["comm_hook"])
        except tierckpt.ConfigError as error:
            outcomes.append("a communication hook already" in str(error))
    with pytest.raises(KeyError, match="bucket"):
        attach(make_job(), place, comm_hook=(None, no_bucket))
    return outcomes


def test_a_given_hook_replaces_no_registered_one(pool: RankPool, place: Place) -> None:
    told = pool.run(given_beside_a_registered_one, place)
    assert told == [[True, True, "allreduce_hook"]] * 2
