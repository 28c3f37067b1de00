"""Parts that the integrations of training frameworks share. They import no framework.

A `Framework` has the versions that an integration was tested with, and the private names it uses.
Some `Notices` are found before there is a checkpointer to give them to.

Gradients that a manual optimization keeps from one batch to the next are in no version. If a
training step accumulates those of one optimizer while another one steps, the boundary waits until
no optimizer has any.

Other numbers of ranks: a job continues in mid-epoch with more or fewer ranks.

Loaders of the frameworks hand out an epoch's samples in order, one global batch after the other.
So the samples of each step are the same for any number of ranks, if ranks x batch size x
accumulated batches is the same: the condition for a restart. Torch's elastic jobs and large-batch
recipes keep this product, too, since learning rate and schedule belong to it.

The end of the process after a framework's training was interrupted, or was not stored: a framework
ends its training by itself, and its script continues as after a whole training: it evaluates,
exports, and ends with status 0. A scheduler that looks at the status then takes the job for done.
`requeue_exit_status` is for such jobs, as for plain loops that never call `should_exit()`, and for
those without their last version somewhere.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import asdict, astuple

from tierckpt._text import counted
from tierckpt._version import is_tested
from tierckpt.checkpointer.adapter import Handle
from tierckpt.checkpointer.checkpointer import Checkpointer
from tierckpt.errors import ConfigError, RestoreError
from tierckpt.resumable_loader import Batch, ResumableLoader, facts_of, generators_of, samplers_of
from tierckpt.state.extras import Generator

__all__ = [
    "Framework",
    "KeptGradients",
    "Notices",
    "Pass",
    "Passes",
    "PlaceOfAnyRanks",
    "StepSize",
    "end_if_interrupted",
    "order_batch_of",
]


UNTESTED = (
    "{name} {version} is not a version that Tierckpt was tested with ({oldest} to {newest}): a "
    "resumed run may differ from an undisturbed one. `tierckpt prove` compares them for your "
    "script; or install a tested version"
)
MISSING = (
    "{name} {version} has no {names}, which Tierckpt needs to resume exactly: this version is not "
    "supported. Install {name} {oldest} to {newest}"
)
Say = Callable[[str, int], None]
"""Takes text and severity."""


class Framework:
    """The tested versions of one framework, both ends included, by major and minor number."""

    def __init__(self, name: str, oldest: str, newest: str) -> None:
        self.name, self.oldest, self.newest = name, oldest, newest

    def warn_if_unknown(self, version: str, say: Say) -> None:
        """Warn if `version` is older or newer than the tested ones."""
        if not is_tested(version, self.oldest, self.newest):
            say(UNTESTED.format(version=version, **vars(self)), logging.WARNING)

    def require(self, version: str, owner: Any, names: Iterable[str]) -> None:
        """Raise ConfigError unless `owner` has all attributes in `names`, which may have dots."""
        missing = [name for name in names if not _has(owner, name)]
        if missing:
            text = MISSING.format(version=version, names=", ".join(missing), **vars(self))
            raise ConfigError(text)


def _has(owner: Any, name: str) -> bool:
    for part in name.split("."):
        if not hasattr(owner, part):
            return False
        owner = getattr(owner, part)
    return True


class Notices:
    """Takes texts with their severity, as `Say`; keeps them until `attach`. Training
    thread."""

    def __init__(self) -> None:
        self._kept: list[tuple[str, int]] = []
        self._handle: Handle | None = None

    def __call__(self, text: str, severity: int) -> None:
        if self._handle is None:
            self._kept.append((text, severity))
        else:
            self._handle.notice(text, severity)

    def attach(self, checkpointer: Checkpointer) -> None:
        """Give all notices to this checkpointer from now on, those that were kept first."""
        self._handle = Handle(checkpointer)
        for text, severity in self._kept:
            self._handle.notice(text, severity)
        self._kept.clear()


PATIENCE_BATCHES = 100
NEVER = (
    f"no checkpoint was taken for {PATIENCE_BATCHES} batches: parameters keep gradients, and their "
    "optimizer made no step. If the training step does not accumulate these gradients, let it call "
    "zero_grad() of that optimizer"
)


class KeptGradients:
    """Watches the steps of all optimizers of a fit. Training thread."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], say: Say) -> None:
        self._optimizers, self._say = optimizers, say
        self._stepped: set[int] = set()
        self._batches = 0
        self._hooks = [each.register_step_post_hook(self._after_step) for each in optimizers]

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._stepped.add(id(optimizer))

    def are_kept(self) -> bool:
        """Whether an optimizer that made no step since the last call has gradients. Called once
        after each batch with a step of some optimizer."""
        others = [each for each in self._optimizers if id(each) not in self._stepped]
        self._stepped.clear()
        kept = any(
            param.grad is not None
            for optimizer in others
            for group in optimizer.param_groups
            for param in group["params"]
        )
        self._batches = self._batches + 1 if kept else 0
        if self._batches == PATIENCE_BATCHES:
            self._say(NEVER, logging.ERROR)
        return kept

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


class Pass:
    """The batches of one pass. A subclass says how it skips some of them."""

    def __init__(self, loader: Any) -> None:
        self._loader, self._batches = loader, iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._batches)

    def skip(self, count: int) -> int:
        """Skip batches without loading them, before the first one; returns how many, 0 where that
        would not be exact."""
        raise NotImplementedError


class Passes:
    """The passes over a loader, each made by `start(loader)`."""

    def __init__(self, loader: Any, start: Callable[[Any], Pass], evaluated: Any = None) -> None:
        """`evaluated`: data of evaluations; their generators are looked for as well."""
        self._loader, self._start, self._evaluated = loader, start, evaluated

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return self._start(self._loader)


OTHER_STEPS = (
    "v{version} was taken with {had} samples a step ({old}), and this job has {has} ({new}): the "
    "samples to skip would not be those trained on, and learning rate and schedule belong to "
    "another batch. {cure}"
)
CURE = "Set {accumulation}={value}, or start {ranks} ranks"
UNKNOWN_SIZE = (
    "v{version} was taken by {had} rank(s), and this job has {has}: the loader's batch size is "
    "unknown (a batch sampler without batch_size), so the samples to skip are, too. Start {had} "
    "rank(s), or start a new job at another path"
)
UNKNOWN_BATCH = (
    "v{version} was taken with {name}={had}, and this job has {name}={has}: the loader's batch "
    "size is unknown (a batch sampler without batch_size), so the samples to skip are, too. Set "
    "{name}={had}, or start a new job at another path"
)
OTHER_ORDER = (
    "v{version}: the sampler makes its order of samples for a batch size, which was {had} and is "
    "{has} now: the samples to skip would not be those trained on. Start {ranks} with the former "
    "batch size and accumulation, or start a new job at another path"
)
OTHER_CURE = "Start {ranks} ranks with the former sizes, or start a new job at another path"


class StepSize(Struct, frozen=True):
    """The samples of one optimizer step, by factors: ranks, samples in a batch of one rank (0: not
    known), and batches that are accumulated."""

    ranks: int
    batch: int
    accumulation: int
    order: int = 0
    """See `order_batch_of`."""

    @property
    def samples(self) -> int:
        """Samples that all ranks together take for one step."""
        return self.ranks * self.batch * self.accumulation

    def batches_for_one_of(self, other: StepSize) -> Fraction:
        """Batches of one rank here that have as many samples as one of `other` there."""
        if (self.ranks, self.batch) == (other.ranks, other.batch):
            return Fraction(1)
        return Fraction(other.ranks * other.batch, self.ranks * self.batch)

    def require(self, saved: StepSize, version: int, names: tuple[str, str]) -> None:
        """Raise RestoreError unless a step has as many samples as one of the saved job. `names`:
        the settings of the framework for batch size and accumulation."""
        if self == saved:
            return
        if not (self.batch and saved.batch):
            raise RestoreError(self._unknown(saved, version, names))
        if self.order != saved.order:
            raise RestoreError(self._other_order(saved, version))
        if self.samples == saved.samples:
            return
        value, rest = divmod(saved.samples, self.ranks * self.batch)
        cure = OTHER_CURE if rest else CURE
        cure = cure.format(accumulation=names[1], value=value, ranks=saved.ranks)
        raise RestoreError(
            OTHER_STEPS.format(
                version=version,
                had=saved.samples,
                has=self.samples,
                old=saved.named(names),
                new=self.named(names),
                cure=cure,
            )
        )

    def _unknown(self, saved: StepSize, version: int, names: tuple[str, str]) -> str:
        if self.ranks != saved.ranks:
            return UNKNOWN_SIZE.format(version=version, had=saved.ranks, has=self.ranks)
        pairs = zip(names, astuple(saved)[1:], astuple(self)[1:], strict=False)
        name, had, has = next((n, a or "?", b or "?") for n, a, b in pairs if a != b)
        return UNKNOWN_BATCH.format(version=version, name=name, had=had, has=has)

    def _other_order(self, saved: StepSize, version: int) -> str:
        facts = {"had": saved.order or "any", "has": self.order or "any"}
        return OTHER_ORDER.format(version=version, ranks=counted(saved.ranks, "rank"), **facts)

    def named(self, names: tuple[str, str]) -> str:
        """The factors, with the settings of the framework as names."""
        count = counted(self.ranks, "rank")
        return f"{count}, {names[0]}={self.batch}, {names[1]}={self.accumulation}"

    def as_dict(self) -> dict[str, int]:
        """The factors, for a version."""
        return asdict(self)


class PlaceOfAnyRanks(ResumableLoader[Batch]):
    """A ResumableLoader of a framework's passes that also takes the place of a job with another
    number of ranks; call `convert` then. Exact if the ranks draw one order of the epoch
    together."""

    _gives_again = False

    def __init__(
        self,
        passes: Iterable[Batch],
        *,
        of: Sequence[Any] = (),
        ahead: int = 0,
        generators: Iterable[Generator] = (),
    ) -> None:
        """`of`: the framework's loaders that `passes` iterates over."""
        self._loaders = of
        super().__init__(passes, ahead=ahead, generators=generators)
        listed = [each for loader in of for each in generators_of(loader)]
        self._listed = generators_of((), [*listed, *self._listed])

    def _facts(self) -> dict[str, Any]:
        each = [facts_of(loader) for loader in self._loaders]
        samples = [facts["samples"] for facts in each if facts["samples"] is not None]
        return {
            "batch_size": None,  # may change with the accumulation, see `StepSize`
            "length": self._length(),
            "samples": sum(samples) if samples else None,
            "sampler": ", ".join(facts["sampler"] for facts in each if facts["sampler"]) or None,
        }

    def load_of_other_ranks(self, state: dict[str, Any], ranks: int) -> None:
        """Take the place of one of `ranks` ranks."""
        self.load_state_dict(state)
        self._forget_batches()

    def load_generators(self, state: dict[str, Any]) -> None:
        """Set the loaders' generators as they were when this place was saved."""
        streams = self._streams()
        streams.own = state["own"]
        self._set(streams)

    def convert(self, factor: Fraction, is_of_other_ranks: bool = False) -> None:
        """Count the batches of the restored epoch in batches of this rank: `factor` for each. A
        batch that the saved loop had taken and not trained on is loaded again."""
        if self._resuming is None or (factor == 1 and not is_of_other_ranks):
            return
        self._forget_batches()
        if factor == 1:
            return
        place = self._place
        trained = place.batches - bool(self._resuming["held"])
        place.batches = math.ceil(trained * factor)
        with contextlib.suppress(TypeError):  # an iterable data set has no length
            place.batches = min(place.batches, len(self))
        self._resuming |= {"place": asdict(place), "held": False, "earlier": None}

    def _forget_batches(self) -> None:
        """Other batches of the same order follow: nothing of the saved ones can be compared."""
        if self._resuming is not None:
            self._place.length = self._place.sampler = None
            self._resuming |= {"place": asdict(self._place), "witness": None}


def order_batch_of(loader: Iterable[Any]) -> int:
    """The batch size for which a sampler makes the order of the epoch: one that sorts samples by
    length within several batches (`LengthGroupedSampler`), or fills batches with alike samples. 0:
    the order is the same for all sizes."""
    sizes = (getattr(each, "batch_size", 0) for each in samplers_of(loader) if _decides(each))
    return next((size for size in sizes if type(size) is int and size), 0)


def _decides(sampler: Any) -> bool:
    """False for batch samplers that keep the order which they get: torch's, and frameworks' around
    another one."""
    kind = type(sampler)
    is_plain = kind.__name__ == "BatchSampler" and kind.__module__.startswith(
        ("torch.", "torchdata.")
    )
    return not is_plain and not hasattr(sampler, "batch_sampler")


def end_if_interrupted(checkpointer: Checkpointer) -> None:
    """Raise SystemExit(`requeue_exit_status`) if set, and the job is to be started again, or
    its `_exit_status`; the same on all ranks. Called last in a training, after the checkpointer is
    closed."""
    status = checkpointer.config.requeue_exit_status
    if status and checkpointer.interrupted:
        raise SystemExit(status)
    if status := checkpointer._exit_status:
        raise SystemExit(status)
