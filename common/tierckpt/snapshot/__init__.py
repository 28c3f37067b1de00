"""Snapshot: one version, copied into a slot while training continues."""

from typing import TYPE_CHECKING

from tierckpt import lazy_exports

if TYPE_CHECKING:
    from .at_boundary import Copied, SmallVersions
    from .copy_engine import VARIABLE as ENGINE_VARIABLE, Desk, Job, Library, Progress, Table
    from .copy_engine import describe as describe_engine, find as find_engine
    from .copy_plan import Binding, CopyPlan
    from .cuda import DeviceCopies, Sources
    from .engine import BlockQueue, Engine, NativeEngine, TorchEngine, Watch
    from .snapshot import Copier, Snapshot
    from .staging import Staging

__getattr__ = lazy_exports(__name__)
