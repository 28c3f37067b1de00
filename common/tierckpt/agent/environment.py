"""The environment that an agent's work depends on, besides its settings: variables of the trainers,
and the folders in which they find modules.

An agent has the environment of the process that started it, and clients of stores keep the one they
started with. So a restarted job compares its environment with that of an agent of an earlier run.
When keys or credentials differ, that agent shuts down and the job starts its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping

from tierckpt._children import module_path, without_packages_own

VARIABLE = "TIERCKPT_AGENT_FINGERPRINT"
"""Gives an agent its fingerprint through its environment, which only its user can read."""
PREFIXES = (
    "TIERCKPT_ENCRYPTION_",
    *("AWS_", "BOTO_", "S3_", "AZURE_", "GOOGLE_", "GCLOUD_", "GCS_", "CLOUDSDK_", "OSS_", "OCI_"),
    *("STORAGE_EMULATOR_", "HADOOP_", "KRB5", "HF_", "FSSPEC_", "SSL_CERT_"),
)
"""Prefixes of variables that keys, stores and their clients read. Settings come with a session."""
NAMES = frozenset(
    (
        *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
        *("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "HOME", "XDG_CONFIG_HOME"),
    )
)
"""More variables, in upper or lower case."""


def environment_fingerprint() -> str:
    """Fingerprint of this process: equal where agents would work alike. It reveals no value."""
    path = without_packages_own(module_path())
    parts = [sys.executable, path, sorted(relevant(os.environ).items())]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def relevant(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that count; all others (ranks, ports) may differ from launch to launch."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(PREFIXES) or name.upper() in NAMES
    }


__all__ = ["VARIABLE", "environment_fingerprint", "relevant"]
