"""A picture of how weights evolve: how far each layer moves from version to version."""

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
"""Of the change of each layer."""


def draw(path: str, first: int | None, last: int | None, out: Path) -> list[int]:
    """Draw the versions of `path` from `first` to `last`, those that a restart could take; returns
    which. Two are open at a time.

    Raises ConfigError where there are no two, or nothing can be drawn with, or written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("drawing needs matplotlib: pip install matplotlib") from error
    versions = versions_at(path, first, last)
    changes = [layer_norms(each) for each in changes_of(path, versions)]
    if not any(changes):
        raise ConfigError(f"{path}: no weight is of the same shape in two versions")
    figure = Figure(figsize=(WIDTH_INCHES, 1.6 + ROW_INCHES * min(len(changes[0]), MOST_ROWS)))
    FigureCanvasAgg(figure)
    _draw(figure, changes, versions)
    try:
        figure.savefig(out, dpi=DPI)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the picture {out}: {error}") from error
    return versions


def versions_at(path: str, first: int | None, last: int | None) -> list[int]:
    """Those that a restart could take, in order. Raises ConfigError for fewer than two."""
    rows = [row for row in rows_of(survey(path)) if row.restartable and row.is_past]
    low, high = first or 0, last if last is not None else max((r.version for r in rows), default=0)
    found = sorted({row.version for row in rows if low <= row.version <= high})
    if len(found) < 2:
        there = ", ".join(f"v{version}" for version in found) or "none"
        raise ConfigError(
            f"{path}: a change takes two versions, and there is {there} to choose from; "
            "local_keep_last, local_keep_every say how many a job keeps"
        )
    return found


def changes_of(path: str, versions: Sequence[int]) -> list[Norms]:
    """From each version to the next one: norms by parameter, of those that both have alike."""
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
    """By layer: `model/body.0.weight` and `model/body.0.bias` are `body.0`; where that leaves too
    many, names are cut shorter."""
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
    """A row for each layer, a column for each step from version to version."""
    import numpy as np
    from matplotlib.colors import LogNorm

    layers = list(dict.fromkeys(name for each in changes for name in each))
    table = np.array([[each.get(layer, np.nan) for each in changes] for layer in layers])
    table[table == 0] = np.nan
    axis = figure.subplots()
    axis.set_facecolor("0.92")
    known = table[np.isfinite(table)]
    scale = LogNorm(known.min(), max(known.max(), known.min() * 1.001)) if known.size else None
    shown = axis.pcolormesh(np.ma.masked_invalid(table), norm=scale, cmap="viridis")
    axis.set_yticks(np.arange(len(layers)) + 0.5, layers, fontsize=8)
    axis.invert_yaxis()
    some = range(0, len(versions), max(1, len(versions) // 12))
    axis.set_xticks([*some], [f"v{versions[i]}" for i in some], fontsize=8)
    axis.set_xlabel("version; between two, the norm of the change (grey: none)", fontsize=9)
    if known.size:
        figure.colorbar(shown, ax=axis).ax.tick_params(which="both", labelsize=8)
    figure.tight_layout()


__all__ = ["changes_of", "draw", "layer_norms", "versions_at"]
