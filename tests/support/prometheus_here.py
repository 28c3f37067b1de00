"""Prometheus's own programs, where they are installed (Debian: prometheus,
prometheus-node-exporter)."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.exported_job import wait_until
from tierckpt.testing import free_ports


def program(name: str) -> str:
    """The path of a program; skips the test if it is not installed."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def get(url: str) -> str:
    """The text at a URL; empty while no server answers."""
    try:
        with urllib.request.urlopen(url, timeout=120) as answer:
            return str(answer.read().decode())
    except (urllib.error.URLError, ConnectionError):
        return ""


def lint(text: str) -> str:
    """What promtool finds to say about metrics; empty if nothing."""
    command = [program("promtool"), "check", "metrics"]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    return done.stdout + done.stderr


@contextlib.contextmanager
def running(command: list[str], folder: Path) -> Iterator[None]:
    """A server, which is ended at the end."""
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        try:
            yield
        finally:
            process.kill()
            process.wait()


class Prometheus:
    """A running server of Prometheus."""

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The value of an expression now. Raises HTTPError with the reason if it has no sense."""
        text = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"{self.url}/api/v1/query?{text}", timeout=120) as answer:
            return list(json.load(answer)["data"]["result"])


@contextlib.contextmanager
def scraping(target: str, folder: Path) -> Iterator[Prometheus]:
    """A server of Prometheus that scrapes `target` (host:port) every 0.1 s."""
    folder.mkdir(exist_ok=True)
    configuration = {
        "global": {"scrape_interval": "100ms", "scrape_timeout": "100ms"},
        "scrape_configs": [{"job_name": "training", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(configuration))  # JSON is YAML
    port = free_ports(1)[0]
    command = [
        program("prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with running(command, folder):
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: get(f"{url}/-/ready"), "Prometheus is not ready")
        yield Prometheus(url)
