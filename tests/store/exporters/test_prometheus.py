"""Prometheus: real scrapes and files, read by its own parser, promtool and node_exporter."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.exported_job import EVENTS, JOB, VALUES, play, wait_until
from tests.support.prometheus_here import get, lint, program, running
from tierckpt import ConfigError
from tierckpt.exporters import PrometheusFile, PrometheusPort, PrometheusRegistry, exporters_of
from tierckpt.testing import TinyJob, free_ports

pytest.importorskip("prometheus_client")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierckpt.exporters.exporter.Exporter.turn_seconds", 0.01)


def samples(text: str) -> dict[str, dict[str, float]]:
    """The values of each series by level, as Prometheus's own client parses them."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        assert family.type in ("counter", "gauge", "histogram"), family.name
        for sample in family.samples:
            assert sample.labels["job_id"]
            level = sample.labels.get("level", "")
            found.setdefault(sample.name, {})[level] = sample.value
    return found


def check(text: str, running: int = 0) -> None:
    """The text has the values of EVENTS."""
    found = samples(text)
    for name, values in {**VALUES, "tierckpt_running": {"": running}}.items():
        assert found[name] == pytest.approx(values), name
    assert "_created" not in text


def scrape(exporter: PrometheusPort) -> str:
    return get(f"http://127.0.0.1:{exporter.port}/metrics")


def test_a_port_is_scraped() -> None:
    exporter = PrometheusPort(0, "127.0.0.1")
    exporter.on_attached(JOB)
    for event in EVENTS:
        exporter.on_event(event)
    exporter.on_step_boundary(10)
    wait_until(lambda: "live_version{" in scrape(exporter), "nothing is served")
    text = scrape(exporter)
    check(text, running=1)
    assert 'rank="2"' in text
    exporter.on_closed()
    assert not scrape(exporter)


def test_promtool_finds_nothing_to_say() -> None:
    program("promtool")
    exporter = PrometheusPort(0, "127.0.0.1")
    exporter.on_attached(JOB)
    for event in EVENTS:
        exporter.on_event(event)
    wait_until(lambda: "drifted_total{" in scrape(exporter), "nothing is served")
    said = lint(scrape(exporter))
    exporter.on_closed()
    assert said == ""


def test_a_job_shows_itself(tmp_path: Path, settings: dict[str, Any], path: Path) -> None:
    """A real training with real checkpoints, switched on by the environment's setting."""
    file = tmp_path / "job.prom"
    with TinyJob(path, export=f"prometheus {file}", agent="inline", **settings) as job:
        job.restore()
        job.run(5)
    found = samples(file.read_text())
    assert found["tierckpt_newest_version"] == {"memory": 5, "local": 5}
    assert found["tierckpt_stored_total"]["local"] >= 1
    assert found["tierckpt_stall_seconds_count"][""] == found["tierckpt_stored_total"]["memory"]
    assert found["tierckpt_running"] == {"": 0}
    assert abs(found["tierckpt_newest_version_timestamp_seconds"]["memory"] - time.time()) < 3600
    with TinyJob(path, export=f"prometheus {file}", agent="inline", **settings) as job:
        job.restore()
    found = samples(file.read_text())
    assert found["tierckpt_restored_version"] == {"": 5}
    assert found["tierckpt_restored_bytes"][""] > 0


def test_a_file_has_the_values_of_the_end(tmp_path: Path) -> None:
    exporter = PrometheusFile(tmp_path / "here.prom")
    play(exporter)
    check((tmp_path / "here.prom").read_text())
    play(exporter, events=())  # a second job of this process
    assert samples((tmp_path / "here.prom").read_text())["tierckpt_rejected_total"] == {"": 0}


def test_in_a_folder_files_are_named_after_the_job(tmp_path: Path) -> None:
    (tmp_path / "tierckpt-demo-1a2b.prom.77.tmp").write_text("half a li")  # of a killed writer
    play(PrometheusFile(tmp_path))
    play(PrometheusFile(tmp_path, ranks="all"))
    assert sorted(os.listdir(tmp_path)) == ["tierckpt-demo-1a2b-r2.prom", "tierckpt-demo-1a2b.prom"]
    with pytest.raises(ConfigError, match=r"on all ranks; put \{rank\} into the name"):
        PrometheusFile(tmp_path / "one.prom", ranks="all")


def test_node_exporter_serves_the_file(tmp_path: Path) -> None:
    node_exporter = program("prometheus-node-exporter")
    play(PrometheusFile(tmp_path))
    port = free_ports(1)[0]
    command = [
        *(node_exporter, "--collector.disable-defaults", "--collector.textfile"),
        f"--collector.textfile.directory={tmp_path}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    url = f"http://127.0.0.1:{port}/metrics"
    with running(command, tmp_path):
        wait_until(lambda: get(url), "node_exporter does not answer")
        text = get(url)
    assert "node_textfile_scrape_error 0" in text
    ours = [line for line in text.splitlines(keepends=True) if "tierckpt_" in line]
    check("".join(line for line in ours if "node_textfile" not in line))


WRITER = """
import sys
from tests.support.exported_job import EVENTS, JOB
from tierckpt.exporters import PrometheusFile
PrometheusFile.turn_seconds = 0
exporter = PrometheusFile(sys.argv[1], every_seconds=0)
exporter.on_attached(JOB)
while True:
    for event in EVENTS:
        exporter.on_event(event)
"""


def test_a_killed_writer_leaves_a_whole_file(tmp_path: Path) -> None:
    """Read at any moment, too."""
    file = tmp_path / "job.prom"
    for _ in range(4):
        file.unlink(missing_ok=True)
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(file)])
        try:
            wait_until(file.exists, "nothing is written")
            texts = {file.read_text() for _ in range(200)}
        finally:
            writer.kill()
            assert writer.wait() == -signal.SIGKILL
        for text in (*list(texts)[:20], file.read_text()):
            assert text.endswith('tierckpt_ranks{job_id="demo-1a2b",rank="2"} 4.0\n')
            samples(text)
    play(PrometheusFile(file))
    assert os.listdir(tmp_path) == ["job.prom"]


@pytest.mark.skipif(os.getuid() != 0, reason="mounting takes root")
def test_on_a_full_disk_the_last_file_stays(
    small_tmpfs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = small_tmpfs / "job.prom"
    exporter = PrometheusFile(file, every_seconds=0)
    exporter.on_attached(JOB)
    wait_until(file.exists, "nothing is written")
    caplog.clear()  # before the disk is full, as it is said once
    fill = small_tmpfs / "fill"
    with contextlib.suppress(OSError), fill.open("wb", buffering=0) as filling:
        while True:
            filling.write(bytes(4096))
    wait_until(lambda: caplog.records, "nothing is said")
    assert "tierckpt_ranks" in file.read_text()
    for event in EVENTS:
        exporter.on_event(event)
    fill.unlink()
    wait_until(lambda: "stall_seconds_sum" in file.read_text(), "it is not tried again")
    exporter.on_closed()
    assert os.listdir(small_tmpfs) == ["job.prom"]
    assert len([r for r in caplog.records if r.levelno == logging.ERROR]) == 1
    assert "PrometheusFile" in caplog.records[0].getMessage()
    assert "No space left on device" in caplog.records[0].getMessage()


@pytest.fixture
def holder() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as held:
        yield held


def test_a_port_in_use_is_said_once_and_tried_again(
    holder: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    port = holder.getsockname()[1]
    exporter = PrometheusPort(port, "127.0.0.1")
    exporter.on_attached(JOB)
    for event in EVENTS:
        exporter.on_event(event)
    exporter.on_step_boundary(10)
    wait_until(lambda: caplog.records, "nothing is said")
    time.sleep(0.05)  # some more tries
    holder.close()
    wait_until(lambda: "live_version{" in scrape(exporter), "it is not tried again")
    check(scrape(exporter), running=1)  # nothing was lost
    exporter.on_closed()
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.getMessage() == (
        f"PrometheusPort({port}) does not export; training continues, and it is tried again. "
        f"OSError: port {port} of 127.0.0.1: Address already in use; choose another port"
    )


def test_an_address_of_another_machine_is_said(caplog: pytest.LogCaptureFixture) -> None:
    exporter = PrometheusPort(9400, "203.0.113.1")
    exporter.on_attached(JOB)
    wait_until(lambda: caplog.records, "nothing is said")
    exporter.on_closed()
    assert caplog.messages[0].endswith(
        "port 9400 of 203.0.113.1: Cannot assign requested address; choose another address"
    )


def test_an_address_of_ipv6_may_have_brackets() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    (exporter,) = exporters_of("prometheus [::1]:0")
    assert isinstance(exporter, PrometheusPort)
    exporter.on_attached(JOB)
    wait_until(lambda: exporter._server is not None, "the port is not open")
    with urllib.request.urlopen(f"http://[::1]:{exporter.port}/metrics", timeout=120) as answer:
        assert b"tierckpt_running{" in answer.read()
    exporter.on_closed()


FORKED = """
import os, sys, time
from tests.support.exported_job import JOB, wait_until
from tierckpt.exporters import PrometheusPort
PrometheusPort.turn_seconds = 0.01
exporter = PrometheusPort(int(sys.argv[1]), "127.0.0.1")
exporter.on_attached(JOB)
wait_until(lambda: exporter._server is not None, "the port is not open")
if os.fork() == 0:  # as a DataLoader's worker
    print("forked", flush=True)
    sys.stdin.read()
    os._exit(0)
time.sleep(3600)
"""


def test_a_forked_worker_does_not_keep_the_port_of_a_killed_trainer() -> None:
    port = free_ports(1)[0]
    trainer = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", FORKED, str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert trainer.stdin is not None
    assert trainer.stdout is not None
    with trainer.stdin, trainer.stdout:
        assert trainer.stdout.readline() == "forked\n"
        trainer.kill()
        trainer.wait()
        exporter = PrometheusPort(port, "127.0.0.1")
        exporter.on_attached(JOB)
        wait_until(lambda: scrape(exporter), "the worker has the port")
        exporter.on_closed()


def test_a_script_that_serves_metrics_already_serves_ours_too() -> None:
    from prometheus_client import CollectorRegistry, Counter, generate_latest

    registry = CollectorRegistry()
    Counter("batches", "of the script", registry=registry).inc()
    exporter = PrometheusRegistry(registry)
    play(exporter)
    play(exporter)
    text = generate_latest(registry).decode()
    assert "batches_total 1.0" in text
    ours = "".join(line for line in text.splitlines(keepends=True) if "tierckpt_" in line)
    check(ours)


def test_all_ranks_of_a_node_have_ports_in_a_row() -> None:
    first = free_ports(1)[0]
    exporter = PrometheusPort(first, "127.0.0.1", ranks="all")
    exporter.on_attached(replace(JOB, rank=3, local_rank=1))
    wait_until(lambda: exporter.port == first + 1 or exporter._failed, "it did not start")
    exporter.on_closed()
    assert exporter.port == first + 1
