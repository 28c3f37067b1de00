"""The history of jobs: records of runs, forks, parts of other jobs' versions, `tierckpt log`."""

from typing import TYPE_CHECKING

from tierckpt import lazy_exports

if TYPE_CHECKING:
    from .fork import PARTS, Selection, matched
    from .history import Branch
    from .run_notes import command_hash, facts_here, git_commit, launcher
    from .source import OwnMarks
    from .tree import tree_of

__getattr__ = lazy_exports(__name__)
