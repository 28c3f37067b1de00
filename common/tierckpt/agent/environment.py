"""What an agent's work depends on beside its settings: the trainers' environment, and the folders
where they find modules.

An agent has them from the process that started it, and clients of stores keep what they began
with. A restarted job that finds the agent of the run before compares: with other keys or
credentials it needs an agent of its own, for which that one shuts down.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping

from tierckpt._children import module_path, without_packages_own

VARIABLE = "TIERCKPT_AGENT_SURROUNDINGS"
"""Tells an agent the fingerprint that it was started with; nobody else sees its environment."""
PREFIXES = (
    "TIERCKPT_ENCRYPTION_",
    *("AWS_", "BOTO_", "S3_", "AZURE_", "GOOGLE_", "GCLOUD_", "GCS_", "CLOUDSDK_", "OSS_", "OCI_"),
    *("STORAGE_EMULATOR_", "HADOOP_", "KRB5", "HF_", "FSSPEC_", "SSL_CERT_"),
)
"""Of variables that keys, stores and their clients read; settings are told otherwise."""
NAMES = frozenset(
    (
        *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
        *("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "HOME", "XDG_CONFIG_HOME"),
    )
)
"""Further ones, in capitals or not."""


def environment_fingerprint() -> str:
    """Of this process: alike where an agent would do the same. From it no value can be read."""
    path = without_packages_own(module_path())
    what = [sys.executable, path, sorted(relevant(os.environ).items())]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()


def relevant(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that count; all others (ranks, ports) may differ from launch to launch."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(PREFIXES) or name.upper() in NAMES
    }


__all__ = ["VARIABLE", "environment_fingerprint", "relevant"]
