"""Categories of a job's time, in the order of reports, with the terms of ML Goodput Measurement."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Category:
    """One category. `google` is its type in the library ML Goodput Measurement."""

    title: str
    google: str
    colour: str


PRODUCTIVE = "productive step time"
SAVING = "checkpoint saving"
PREPARATION = "training preparation"
STARTUP = "program startup"
RECOVERY = "infrastructure recovery"
CATEGORIES = {
    "training": Category("training that counted", PRODUCTIVE, "#54a24b"),
    "checkpoint": Category("checkpoint stalls", SAVING, "#f58518"),
    "close": Category("final checkpoint", SAVING, "#ffbf79"),
    "lost": Category("lost work", "wasted progress", "#e45756"),
    "noticed": Category("failure noticed", RECOVERY, "#b279a2"),
    "ended": Category("processes ended", RECOVERY, "#d6a5c9"),
    "relaunch": Category("processes started again", RECOVERY, "#9d755d"),
    "import": Category("imports", STARTUP, "#4c78a8"),
    "setup": Category("setup by the script", PREPARATION, "#72b7b2"),
    "rendezvous": Category("wait for other ranks", PREPARATION, "#9ecae9"),
    "attach": Category("attach", PREPARATION, "#88d27a"),
    "restore": Category("restore", "checkpoint loading", "#eeca3b"),
    "first_step": Category("first step", STARTUP, "#2f6b99"),
    "waiting": Category("wait for machines", RECOVERY, "#bab0ac"),
}
NOT_RUNNING = "not_running"
"""Time after an end that nobody had to follow; it is no part of the elapsed time."""
WITHOUT_PROCESSES = ("relaunch", "waiting")
"""Categories in which the job has no processes: the badput of scheduling."""
RESTART = ("noticed", "ended", "relaunch", "import", "setup", "rendezvous", "attach", "restore")
"""Categories between the failure and the first step."""
