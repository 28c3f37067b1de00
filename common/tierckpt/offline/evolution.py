"""A picture of the weights' evolution: the change of each layer from version to version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

from tierckpt.errors import ConfigError
from tierckpt.restore.progress import Progress
from tierckpt.state.names import FIXED

from .catalog import rows_of
from .difference import compare_tensors
from .entry_names import in_order
from .stored_version import StoredVersion, open_version
from .survey import survey

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_ROWS = 24
WIDTH_INCHES, ROW_INCHES, DPI = 9.0, 0.22, 150
Norms = dict[str, float]
"""Norm of the change, by layer."""


def draw(path: str, first: int | None, last: int | None, out: Path) -> list[int]:
    """Draw the restorable versions of `path` from `first` to `last`; returns their numbers. Two are
    open at a time.

    Raises ConfigError if there are fewer than two, if matplotlib is missing, or if the file cannot
    be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("drawing needs matplotlib: pip install matplotlib") from error
    versions = versions_at(path, first, last)
    changes = [layer_norms(each) for each in changes_of(path, versions)]
    if not any(changes):
        raise ConfigError(f"{path}: no weight has the same shape in two versions")
    figure = Figure(figsize=(WIDTH_INCHES, 1.6 + ROW_INCHES * min(len(changes[0]), MOST_ROWS)))
    FigureCanvasAgg(figure)
    _draw(figure, changes, versions)
    try:
        figure.savefig(out, dpi=DPI)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the picture {out}: {error}") from error
    return versions


def versions_at(path: str, first: int | None, last: int | None) -> list[int]:
    """The restorable versions in order. Raises ConfigError for fewer than two."""
    rows = [row for row in rows_of(survey(path)) if row.restartable and row.is_past]
    low, high = first or 0, last if last is not None else max((r.version for r in rows), default=0)
    found = sorted({row.version for row in rows if low <= row.version <= high})
    if len(found) < 2:
        there = ", ".join(f"v{version}" for version in found) or "none"
        raise ConfigError(
            f"{path}: the change needs two versions, but there is {there}; local_keep_last and "
            "local_keep_every decide how many a job keeps"
        )
    return found


def changes_of(path: str, versions: Sequence[int]) -> list[Norms]:
    """Norms of the change from each version to the next, for parameters of equal shape."""
    found: list[Norms] = []
    with ExitStack() as stack:
        bar = stack.enter_context(closing(Progress(Progress.wanted(0, None))))
        bar.begin("comparing")
        before = open_version(path, versions[0], bar.advance)
        try:
            for version in versions[1:]:
                after = open_version(path, version, bar.advance)
                try:
                    found.append(_norms(before, after))
                finally:
                    before.close()
                    before = after
        finally:
            before.close()
    return found


def _norms(a: StoredVersion, b: StoredVersion) -> Norms:
    found = Norms()
    for name in in_order(a.names() & b.names()):
        if not name.startswith(FIXED[0]):
            continue
        one = compare_tensors(name, a.tensor(name, 0), b.tensor(name, 0))
        if one is None:
            found[name] = 0.0
        elif one.numbers is not None and one.numbers.norm is not None:
            found[name] = one.numbers.norm
    return found


def layer_norms(norms: Mapping[str, float]) -> Norms:
    """Norms by layer: `model/body.0.weight` and `model/body.0.bias` are `body.0`. If there are too
    many layers, names are shortened further."""
    names = {name: name.split("/", 1)[1] for name in norms}
    deepest = max((name.count(".") for name in names.values()), default=0)
    rows = names
    for depth in range(deepest, 0, -1):
        rows = {n: ".".join(own.split(".")[:-1][:depth]) or own for n, own in names.items()}
        if len(set(rows.values())) <= MOST_ROWS:
            break
    found = Norms()
    for name, norm in norms.items():
        found[rows[name]] = (found.get(rows[name], 0.0) ** 2 + norm**2) ** 0.5
    return found


def _draw(figure: Figure, changes: Sequence[Norms], versions: Sequence[int]) -> None:
    """Draw a row for each layer, and a column for each step between versions."""
    import numpy as np
    from matplotlib.colors import LogNorm

    layers = list(dict.fromkeys(name for each in changes for name in each))
    table = np.array([[each.get(layer, np.nan) for each in changes] for layer in layers])
    table[table == 0] = np.nan
    axis = figure.subplots()
    axis.set_facecolor("0.92")
    finite = table[np.isfinite(table)]
    scale = LogNorm(finite.min(), max(finite.max(), finite.min() * 1.001)) if finite.size else None
    shown = axis.pcolormesh(np.ma.masked_invalid(table), norm=scale, cmap="viridis")
    axis.set_yticks(np.arange(len(layers)) + 0.5, layers, fontsize=8)
    axis.invert_yaxis()
    some = range(0, len(versions), max(1, len(versions) // 12))
    axis.set_xticks([*some], [f"v{versions[i]}" for i in some], fontsize=8)
    axis.set_xlabel("version; between two, the norm of the change (grey: none)", fontsize=9)
    if finite.size:
        figure.colorbar(shown, ax=axis).ax.tick_params(which="both", labelsize=8)
    figure.tight_layout()


__all__ = ["changes_of", "draw", "layer_norms", "versions_at"]
