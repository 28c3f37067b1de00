"""`tierckpt run`: a shim between a launcher and a training script, which restarts the script within
a second.

Each rank's process imports torch and other modules, and forks the script's process, which so starts
in milliseconds. When the script of one rank fails, the shims of all ranks end theirs, and the next
attempt's processes, forked already, begin. A shim holds no thread, no CUDA context and no
communication of torch's when it forks. The idea is that of a zygote (Android), and of restarts in
place of the launcher's (NVIDIA's Resiliency Extension).
"""

from typing import TYPE_CHECKING

from tierckpt import lazy_exports

if TYPE_CHECKING:
    from .coordinator import Coordinator, End, Finish, Leave, Spares, Start
    from .coordinator import describe as describe_end
    from .launcher import Place, parse as parse_options, place_of, slot_of, take_place
    from .meeting import Connection, Meeting, meeting_of
    from .preload import Learned, LearnedFile
    from .process import copy_as

__getattr__ = lazy_exports(__name__)
