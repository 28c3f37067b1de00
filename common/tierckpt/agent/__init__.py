"""Agent: the node's agent process, and the trainer's connection to it. No torch."""

from typing import TYPE_CHECKING

from tierckpt import lazy_exports

if TYPE_CHECKING:
    from .address import AgentFiles, AgentSettings, environment_fingerprint
    from .client import AgentClient, AgentConnection
    from .flusher import Bases, EncodedSource, Flusher, LostBaseError, open_base
    from .mirror import Mirror
    from .pipeline import Hosted, HostedOrder, ShardGuard, Stage, open_shard, sound_image
    from .protocol import PROTOCOL, AgentAddress, AgentMessage, AgentStatus, AskProgress, Bye
    from .protocol import Commit, CommitFailed, Committed, Finished, Flush, FlushFailed, FlushOrder
    from .protocol import (
        Flushed,
        Forward,
        Hello,
        Inherit,
        Introduce,
        KnownNodes,
        LevelStatus,
        Listen,
    )
    from .protocol import ListenFailed, ListenSettings, Listening, Message, Outdated, PartySettings
    from .protocol import PersistentSettings, Problem, Progress, Protect, ProtectFailed, Protected
    from .protocol import Retire, ServedPlaces, SessionSettings, ShuttingDown, Staged, StageFailed
    from .protocol import (
        TaskStatus,
        Unwelcome,
        Welcome,
        encode as encode_message,
        receive as receive_message,
    )
    from .protocol import send as send_message, version_of
    from .server import Agent, TrainerSession
    from .status import GONE, RUNS, SILENT, Activity, StatusServer, Task, find_agents

__getattr__ = lazy_exports(__name__)
