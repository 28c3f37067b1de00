"""Doctor: facts of a machine, its software and its settings that checkpoints depend on, with cures.

`examination.examine` runs the checks of all modules and returns findings; `cli.doctor` draws them.
A check is independent of all others: an error in it is a finding. The checks of directories and
memory are those of `storage.health`, which `tierckpt health` makes before a start.
"""

from typing import TYPE_CHECKING

from tierckpt import lazy_exports

if TYPE_CHECKING:
    from .examination import LIMIT_SECONDS, Report, Section, examine
    from .probes import Horovod, probe, understand
    from .software import PROBE_SECONDS, Finding, Mark, Subject, good, valid_config, warning

__getattr__ = lazy_exports(__name__)
