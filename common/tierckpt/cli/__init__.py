"""Command line: `tierckpt` and its subcommands, one module for each kind."""

from typing import TYPE_CHECKING

from tierckpt import lazy_exports

if TYPE_CHECKING:
    from .arguments import Target, duration, targets_of
    from .exchange import export_version
    from .main import COMMANDS, GROUPS, main as run_command
    from .output import UNLIMITED
    from .plans import observe, read_events
    from .versions import list_versions

__getattr__ = lazy_exports(__name__)
