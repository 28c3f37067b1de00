"""One `restore()`, as a straight line: plan -> read -> verify -> load -> repair.

| step | function | takes | returns |
|---|---|---|---|
| inventory | `JobHistory.look` | the contents of all levels | every rank's inventory |
| plan | `Candidates.plan` | inventories without the copies that proved bad | a RestorePlan |
| read | `verification.read` | the plan | this rank's ShareRead |
| verify | `verification.verify` | all ranks' shares | a VerifiedVersion, or failures: plan again |
| load | `load_found` | the version, the live state | a LoadedVersion |
| repair | `checkpointer.levels` | the version | whether it is whole again |

`VersionSearch` runs the steps up to the verified version; `load_found` loads it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from msgspec import Struct

from tierckpt._text import error_text
from tierckpt.coordination.error_barrier import ErrorBarrier
from tierckpt.errors import MAX_DIFFERENCES, StateMismatchError, StateTornError
from tierckpt.format.manifest import Manifest
from tierckpt.restored import Restored
from tierckpt.state import process_state
from tierckpt.state.training_state import TrainingState

from .loader import Loader, TensorPreallocator
from .search import VersionSearch
from .verification import VerifiedVersion


class LoadedVersion(Struct, frozen=True):
    """The loaded version, on this rank."""

    manifest: Manifest
    """This rank's manifest."""
    result: Restored
    notices: list[str]
    adapter: Any
    """The adapter's part of the checkpoint."""


def load(
    state: TrainingState,
    version: VerifiedVersion,
    group: ErrorBarrier,
    strict: bool,
    new: TensorPreallocator,
    make_loader: Callable[..., Loader] = Loader,
    name: str = "",
) -> LoadedVersion:
    """Load a verified version into the live state, with the loader that `make_loader` makes: for
    a part of a version, another one than `Loader`. `name`: the version in errors. Collective.

    Raises StateMismatchError on all ranks, with nothing changed on any, if the structure of any
    rank's live state differs and `strict` is True. Raises RestoreError on all ranks if a rank has
    no memory for new tensors, or fails in another way before the first change. A later failure on a
    rank becomes its `version.trouble`, see `all_finished`. Any other error, such as a lost rank,
    leaves `state.torn` True if anything was changed.
    """
    with group:
        loader = make_loader(state, version.contents, group.rank, group.size, new, strict)
        differences = loader.differences()
        loader.prepare()
        version.broadcaster.make_room(version.contents.outlines)
        saved = loader.saved
        grown = group.size > loader.shards
        streams = saved.get("rng")  # an imported version has none
        report = (differences, process_state.digests_of(streams) if grown and streams else {})
        all_differences, digests = zip(*group.all_gather_object(report), strict=True)
        found: list[str] = next((each for each in all_differences if each), [])
        if found and strict:
            raise StateMismatchError(name or f"Version {version.plan.id}", found, loader.way_out)
        result = version.report(loader.manifest)
        result.imported = saved.get("imported", {}).get("from", "")
        version.progress.start_phase(f"loading v{version.plan.id.version}", version.nbytes)
        first = [] if group.rank == 0 else all_differences[0]
        notices = _accepted([each for each in differences if each not in first])
        loader.choose_shards()
    state.torn = True
    with torch.no_grad():
        version.visit(loader.load_window, loader.wants)
    try:
        with torch.no_grad():
            version.trouble = version.trouble or _finish(loader)
        # Last: loading may have drawn random numbers.
        notices += loader.notices
        if streams is not None:
            notices += process_state.take_up(
                streams,
                loader.manifest.id.version,
                group.rank,
                digests[: loader.shards],
                state.cuda_device(),
            )
    except Exception as error:
        version.fail(error)
    state.torn = bool(version.trouble)
    return LoadedVersion(loader.manifest, result, notices, saved.get("adapter"))


def load_found(
    search: VersionSearch,
    state: TrainingState,
    found: VerifiedVersion,
    strict: bool,
    load_adapter: Callable[[Any], None],
) -> LoadedVersion:
    """Load the version that `search.find` returned; the result reports the work done. Collective.

    `load_adapter` receives the adapter's part; if it raises, the error is the version's trouble.
    Raises the errors of `load`.
    """
    start = time.perf_counter()
    new, name = search.new, search.name_of(found)
    assert new is not None
    loaded = load(state, found, search.error_barrier, strict, new, name=name)
    try:
        load_adapter(loaded.adapter)
        search.report_loaded(loaded.manifest, loaded.result, loaded.notices)
        loaded.result.seconds["load"] = time.perf_counter() - start
    except Exception as error:
        found.fail(error)
        state.torn = True
    return loaded


def _accepted(differences: Sequence[str]) -> list[str]:
    """The notices of differences that a rank alone has, or that rank 0 shows for all."""
    shown = [f"accepted (strict=False): {each}" for each in differences[:MAX_DIFFERENCES]]
    hidden = len(differences) - MAX_DIFFERENCES
    return [*shown, f"accepted (strict=False): {hidden} more differences"] if hidden > 0 else shown


def _finish(loader: Loader) -> str:
    """Load everything after the tensors; returns the failure as text."""
    try:
        loader.finish()
    except Exception as error:
        return (
            f"{error_text(error, StateTornError)}. Model and optimizer already have that version. "
            "Pass the objects that the checkpoint was made with, or leave out the named one (and "
            "restore with strict=False), and restart the job"
        )
    return ""


def live_bytes(state: TrainingState) -> int:
    """Bytes of the version's tensors that this rank already holds in memory."""
    walk = state.walk()
    tensors = [*walk.params, *walk.buffers, *(tensor for tensor, *_ in walk.state)]
    return sum(t.numel() * t.element_size() for t in tensors if t.device.type == "cpu")


__all__ = ["LoadedVersion", "live_bytes", "load", "load_found"]
