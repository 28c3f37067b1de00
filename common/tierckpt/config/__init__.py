"""Configuration: constructor arguments over `TIERCKPT_*` variables over a TOML file.

One flat name serves everywhere: `local_every_steps=10` as an argument,
`TIERCKPT_LOCAL_EVERY_STEPS=10` in the environment, and in the file either
`local_every_steps = 10` or `every_steps = 10` in a table `[local]`.

| module | content |
|---|---|
| `sources` | where values come from: arguments, variables, the file; their types |
| `config` | all settings, and their defaults |
| `checks` | every value, and settings that do not go together |
| `places` | paths, and names that are parts of paths |
| `halt_texts` | the signals and notices that end a job |
| `limits` | checks of one value |
| `level_tables` | the settings of each level, and their defaults |

A module imports only from those below it. Other folders import from here.
"""

from __future__ import annotations

from .config import Config, known_settings
from .halt_texts import CLOUDS, parse_notices, parse_signals
from .level_tables import (
    AUTO,
    AUTOMATIC,
    STORAGE_OPTIONS,
    TABLES,
    LocalConfig,
    MemoryConfig,
    PeerConfig,
    PersistentConfig,
    Steps,
)
from .limits import DAY_SECONDS, YEAR_SECONDS
from .places import DEFAULT_ID_BYTES, FOLDERS, NAME_BYTES
from .sources import ARGUMENTS, NOT_SETTINGS, PREFIX, load_config

__all__ = [
    "ARGUMENTS",
    "AUTO",
    "AUTOMATIC",
    "CLOUDS",
    "DAY_SECONDS",
    "DEFAULT_ID_BYTES",
    "FOLDERS",
    "NAME_BYTES",
    "NOT_SETTINGS",
    "PREFIX",
    "STORAGE_OPTIONS",
    "TABLES",
    "YEAR_SECONDS",
    "Config",
    "LocalConfig",
    "MemoryConfig",
    "PeerConfig",
    "PersistentConfig",
    "Steps",
    "known_settings",
    "load_config",
    "parse_notices",
    "parse_signals",
]
