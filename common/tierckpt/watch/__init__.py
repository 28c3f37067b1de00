"""The state of a job as a process outside it sees it: `tierckpt watch`.

`observer` collects an observation from the job's files, its memory on this machine, its agents
there, and its events; `view` has the values, and `drawing` shows them. Nothing is written, no
trainer is asked, and the work of one look does not grow with the length of the job.
"""

from typing import TYPE_CHECKING

from tierckpt import lazy_exports

if TYPE_CHECKING:
    from .drawing import clock, drawn, span
    from .observer import Observer, level_views, look_at, restart_of, steps_per_second
    from .view import AgentView, EventsView, Incident, JobState, LevelView, Node, Restart, Slow
    from .view import View, Work

__getattr__ = lazy_exports(__name__)
