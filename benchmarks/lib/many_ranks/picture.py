"""The picture of manyranks.py."""

from __future__ import annotations

from collections.abc import Sequence

Figures = dict[str, float]


PANELS: dict[str, tuple[str, ...]] = {
    "restart: CPU time of one rank, s": (
        *("inventories_seconds", "plan_memory_seconds", "plan_lost_node_seconds"),
        *("plan_half_seconds", "history_seconds", "settings_seconds", "meeting_seconds"),
    ),
    "a version: CPU time of one process, s": (
        *("layout_seconds", "retention_seconds", "flush_first_node_seconds"),
        *("flush_last_node_seconds", "open_shard_seconds", "retire_seconds"),
    ),
    "commands: CPU time, s": ("list_seconds", "verify_seconds"),
    "bytes; files": (
        *("inventories_received_bytes", "settings_received_bytes", "meeting_received_bytes"),
        *("version_manifest_bytes", "manifest_bytes", "vote_bytes", "version_files"),
    ),
}
"""The main parts, by picture."""


def plot(rows: Sequence[Figures], path: str) -> None:
    """Draw times, bytes and files over the number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(13, 9))
    for axis, (title, names) in zip(axes.flat, PANELS.items(), strict=True):
        for name in names:
            if points := [(row["ranks"], row[name]) for row in rows if row.get(name)]:
                text = name.removesuffix("_seconds").replace("_", " ")
                axis.plot(*zip(*points, strict=True), marker="o", label=text)
        axis.set(xscale="log", yscale="log", xlabel="ranks", title=title)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
