"""Fast starts stay fast: the agent and the command line start without torch."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.horovod_here import horovod_missing
from tests.support.warm_python.servers import PYTHON

LIGHT = """
tierckpt tierckpt.agent.process tierckpt.agent.protocol tierckpt.cli.main tierckpt.cli.trace
tierckpt.config tierckpt.events tierckpt.lightning.entry_points tierckpt.storage.inventory
tierckpt.storage.durable tierckpt.storage.job_directory tierckpt.storage.local
tierckpt.storage.slots tierckpt.core.decisions tierckpt.testing tierckpt.testing.fault_injection
tierckpt.tracing.recorder
tierckpt.erasure.groups tierckpt.erasure.codes tierckpt.exporters:exporters_of
tierckpt.exporters:PrometheusPort tierckpt.exporters:PrometheusFile tierckpt.exporters:OpenTelemetry
tierckpt.exporters:TensorBoard tierckpt.exporters:WandB tierckpt.exporters:MLflow
tierckpt.run.__main__
"""
LIBRARIES = "torch numpy prometheus_client opentelemetry tensorboard wandb mlflow"
LATER = """
tierckpt.agent.flusher tierckpt.agent.protector tierckpt.peer.remote_reads tierckpt.peer.exchange
tierckpt.peer.windows
"""
"""Modules that agents load later. An import of torch would take seconds, and 200 MB a node; numpy
is for jobs with a peer level."""
ONE_BY_ONE = """
import importlib, sys
for each in sys.argv[1].split():
    module, _, name = each.partition(":")
    getattr(importlib.import_module(module), name or "__name__")
    if there := [heavy for heavy in sys.argv[2].split() if heavy in sys.modules]:
        sys.exit(f"{each} imports {there}")
"""


@pytest.mark.parametrize(("modules", "heavy"), [(LIGHT, LIBRARIES), (LATER, "torch")])
def test_modules_do_without_heavy_ones(modules: str, heavy: str) -> None:
    command = [sys.executable, "-c", ONE_BY_ONE, modules, heavy]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_public_name_is_there() -> None:
    import tierckpt
    import tierckpt.testing

    for package in (tierckpt, tierckpt.testing):
        for name in package.__all__:
            assert getattr(package, name) is not None
        with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
            _ = package.nonsense


PACKAGE = Path(__file__).parents[2] / "common" / "tierckpt"
FACES = sorted(path.parent for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE)


@pytest.mark.parametrize("folder", FACES, ids=lambda folder: folder.name)
def test_what_a_face_exports_is_there_and_hides_no_module(folder: Path) -> None:
    source = ast.parse((folder / "__init__.py").read_text())
    blocks = [source.body, *(node.body for node in source.body if isinstance(node, ast.If))]
    nodes = [node for block in blocks for node in block]
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.level]
    names = [each.asname or each.name for node in imports for each in node.names]
    if folder.name != "lightning":  # of which tests/store/lightning imports the name, in seconds
        face = importlib.import_module(".".join(folder.relative_to(PACKAGE.parent).parts))
        assert [name for name in names if not hasattr(face, name)] == []
    assert [name for name in names if (folder / f"{name}.py").exists()] == []


SECOND_NAMES = """
import sys, tierckpt
assert not {"ddp_ckpt", "horovod_ckpt"} & {*sys.modules}
import ADAPTER, tierckpt.NAME as second
from tierckpt.NAME import Checkpointer
assert second is ADAPTER is tierckpt.NAME
assert Checkpointer is ADAPTER.Checkpointer
"""
MODULES = """
import tierckpt.horovod.torch as hvd, horovod_ckpt.torch
from tierckpt.horovod.elastic import TorchState
assert hvd is horovod_ckpt.torch
assert TorchState is horovod_ckpt.elastic.TorchState
"""


@pytest.mark.parametrize("name", ["ddp", "horovod"])
def test_an_adapter_has_a_second_name(name: str, warm_python: None) -> None:
    if name == "horovod" and (why := horovod_missing()):
        pytest.skip(why)
    program = SECOND_NAMES + (MODULES if name == "horovod" else "")
    program = program.replace("ADAPTER", f"{name}_ckpt").replace("NAME", name)
    done = subprocess.run([PYTHON, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
