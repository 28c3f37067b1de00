"""A picture of the weights over versions: their norms, and those of the changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tierckpt._text import some
from tierckpt.errors import ConfigError, RestoreError
from tierckpt.format.ids import VersionId
from tierckpt.restore.progress import Progress
from tierckpt.restore.shard_image import LOST
from tierckpt.state.names import FIXED

from ..difference import compare_tensors, norm_of
from ..entry_names import Names, in_order, patterns_of
from ..stored_version import OnRead, StoredVersion, open_version
from ..survey import Survey
from .choice import Choice, Chosen, choose
from .history import chosen

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_ROWS = 24
WIDTH_INCHES, ROW_INCHES, DPI = 9.0, 0.22, 150
Norms = dict[str, float]
"""A norm by tensor, or by layer."""


@dataclass(frozen=True)
class Evolution:
    """Norms of tensors over versions."""

    versions: list[int]
    changes: list[Norms]
    """From each version to the next."""
    weights: list[Norms]
    """At each version."""
    gaps: list[str]
    """Sentences about chosen versions that cannot be read."""

    def by_layer(self) -> Evolution:
        """The same for layers, see `layer_norms`."""
        changes, weights = ([layer_norms(n) for n in each] for each in (self.changes, self.weights))
        return replace(self, changes=changes, weights=weights)


def draw(
    path: str, out: Path, names: Names | None = None, choice: Choice | None = None
) -> Evolution:
    """Draw the chosen versions of `path`; returns the figures. Two are open at a time. `names` are
    as for `tierckpt.history`; None: all parameters.

    Raises ConfigError if there are fewer than two, if matplotlib is missing, or if the file cannot
    be written; RestoreError and the errors of reading.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "drawing needs matplotlib, which is not installed: pip install 'tierckpt[plot]'"
        ) from error
    found = evolution(path, names, choice).by_layer()
    rows = min(len(found.weights[0]), MOST_ROWS)
    figure = Figure(figsize=(WIDTH_INCHES, 2 * (1.3 + ROW_INCHES * rows)))
    FigureCanvasAgg(figure)
    _draw(figure, found)
    try:
        figure.savefig(out, dpi=DPI)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the picture {out}: {error}") from error
    return found


def evolution(path: str, names: Names | None = None, choice: Choice | None = None) -> Evolution:
    """Norms of the chosen tensors, in float64. A version without a sound copy is left out, and
    among the gaps. Raises as `draw`."""
    patterns = None if names is None else patterns_of(names)
    there = versions_at(path, choice or Choice())
    found = Evolution([], [], [], [*there.gaps])
    before: StoredVersion | None = None
    with ExitStack() as stack:
        bar = stack.enter_context(closing(Progress(Progress.wanted(0, None))))
        bar.begin("comparing")
        stack.callback(lambda: before.close() if before is not None else None)
        for id_, part in there.parts.items():
            if (after := _added(found, before, path, id_, part, patterns, bar.advance)) is None:
                continue
            if before is not None:
                before.close()
            before = after
            if not found.weights[0]:
                here = some([*chosen(after, ("*", "*/*"))], 6)
                asked = " or ".join(patterns or ("*",))
                raise ConfigError(f"{path}: {id_} has no numbers named {asked}, but {here}")
    if len(found.versions) < 2:
        why = some(found.gaps, between="; ")
        raise RestoreError(f"{path}: fewer than two of the versions can be read: {why}")
    return found


def _added(
    found: Evolution,
    before: StoredVersion | None,
    path: str,
    id_: VersionId,
    part: Survey,
    patterns: Sequence[str] | None,
    on_read: OnRead,
) -> StoredVersion | None:
    """Add a version, and return it open; None if there is no sound copy. If a copy proves damaged
    the verified ones are read; if that fails the copy of `before` is the damaged one."""
    for verify in (False, True):
        try:
            after = open_version(path, id_.version, on_read, part, verify)
        except RestoreError as error:
            found.gaps.append(str(error))
            return None
        with ExitStack() as undo:
            undo.callback(after.close)
            try:
                _add(found, before, after, patterns)
            except LOST:
                if not verify:
                    continue
                _add(found, None, after, patterns)
            undo.pop_all()
        found.versions.append(id_.version)
        return after
    raise AssertionError


def versions_at(path: str, choice: Choice) -> Chosen:
    """The versions to draw, oldest first. Raises ConfigError for fewer than two."""
    found = choose(path, choice)
    if len(found.parts) < 2:
        seen = some([str(id_) for id_ in found.parts]) or "none"
        asked = f" for {choice}" if str(choice) else ""
        others = some([f"v{version}" for version in found.others], 6)
        more = f", and others ({others})" if others else ""
        raise ConfigError(
            f"{path}: the change needs two versions, but there is {seen}{asked}{more}; "
            + (
                found.hint
                or "local_keep_every and persistent_keep_every decide how many a job keeps"
            )
        )
    return found


def _entries(version: StoredVersion, patterns: Sequence[str] | None) -> Iterable[str]:
    if patterns is None:
        return in_order(each for each in version.names() if each.startswith(FIXED[0]))
    return dict.fromkeys(chosen(version, patterns).values())


def _weights(version: StoredVersion, patterns: Sequence[str] | None) -> Norms:
    found = Norms()
    for entry in _entries(version, patterns):
        stored = version.tensor(entry, 0)
        if stored is not None and (norm := norm_of(stored)) is not None:
            found[entry] = norm
    return found


def _add(
    found: Evolution, a: StoredVersion | None, b: StoredVersion, patterns: Sequence[str] | None
) -> None:
    """Add the norms of `b`, and of the change from `a`, if that can be read."""
    changes, weights = Norms(), _weights(b, patterns) if a is None else Norms()
    if a is not None:
        for entry in _entries(b, patterns):
            _add_tensor(entry, a, b, found.weights[-1], changes, weights)
    if found.weights:
        found.changes.append(changes)
    found.weights.append(weights)


def _add_tensor(
    entry: str, a: StoredVersion, b: StoredVersion, known: Norms, changes: Norms, weights: Norms
) -> None:
    """Add one tensor's norms to `changes` and `weights`; `known` are those of `a`. What has not
    changed is not read."""
    before, after = a.tensor(entry, 0), b.tensor(entry, 0)
    one = compare_tensors(entry, before, after)
    if one is None and entry in known:
        changes[entry], weights[entry] = 0.0, known[entry]
    elif one is not None and one.numbers is not None and one.numbers.norm is not None:
        changes[entry], weights[entry] = one.numbers.norm, one.numbers.norm_b or 0.0
    elif one is not None and after is not None and (norm := norm_of(after)) is not None:
        weights[entry] = norm  # new, or of another shape


def layer_norms(norms: Mapping[str, float]) -> Norms:
    """Norms by layer: `model/body.0.weight` and `model/body.0.bias` are `body.0`. If there are too
    many layers, names are shortened further."""
    names = {name: _path_in(name) for name in norms}
    deepest = max((path.count(".") for _, path, _ in names.values()), default=0)
    rows = {name: "".join(parts) for name, parts in names.items()}
    for depth in range(deepest, 0, -1):
        rows = {
            name: before + (".".join(path.split(".")[:-1][:depth]) or path) + key
            for name, (before, path, key) in names.items()
        }
        if len(set(rows.values())) <= MOST_ROWS:
            break
    found = Norms()
    for name, norm in norms.items():
        found[rows[name]] = (found.get(rows[name], 0.0) ** 2 + norm**2) ** 0.5
    return found


def _path_in(name: str) -> tuple[str, str, str]:
    """A parameter's path in an entry's name, with what is before and after it."""
    before, _, path = name.partition("/")
    if name.startswith(FIXED):
        return "", path, ""
    path, _, key = path.rpartition("/")
    return f"{before}/", path, f"/{key}"


def _draw(figure: Figure, found: Evolution) -> None:
    """Draw a row for each layer; a column for each step between versions, and below for each
    version."""
    upper, lower = figure.subplots(2)
    versions = found.versions
    between = [f"v{version}" for version in versions[1:]]
    _table(
        figure, upper, found.changes, between, "norm of the change up to the version (grey: none)"
    )
    _table(figure, lower, found.weights, [f"v{v}" for v in versions], "norm at the version")
    figure.tight_layout()


def _table(
    figure: Figure, axis: Axes, norms: Sequence[Norms], columns: Sequence[str], text: str
) -> None:
    import numpy as np
    from matplotlib.colors import LogNorm

    layers = list(dict.fromkeys(name for each in norms for name in each))
    table = np.array([[each.get(layer, np.nan) for each in norms] for layer in layers])
    table = table.reshape(len(layers), len(norms))
    table[table == 0] = np.nan
    axis.set_facecolor("0.92")
    finite = table[np.isfinite(table)]
    scale = LogNorm(finite.min(), max(finite.max(), finite.min() * 1.001)) if finite.size else None
    axis.set_yticks(np.arange(len(layers)) + 0.5, layers, fontsize=8)
    axis.set_xlabel(text, fontsize=9)
    some = range(0, len(columns), max(1, len(columns) // 12))
    axis.set_xticks([i + 0.5 for i in some], [columns[i] for i in some], fontsize=8)
    if layers:
        shown = axis.pcolormesh(np.ma.masked_invalid(table), norm=scale, cmap="viridis")
        axis.invert_yaxis()
        if finite.size:
            figure.colorbar(shown, ax=axis).ax.tick_params(which="both", labelsize=8)


__all__ = ["Evolution", "draw", "evolution", "layer_norms", "versions_at"]
