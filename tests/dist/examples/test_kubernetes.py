"""The manifests of examples/kubernetes: against the clusters' own schemas, against each other, and
run in pods on this machine."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.pod import Pod, require_pods
from tests.support.restart_job import EXAMPLES, PATIENCE_SECONDS, RestartJob
from tests.support.thorough import on_demand
from tierckpt.config import load_config
from tierckpt.testing import free_ports

yaml = pytest.importorskip("yaml", reason="needs PyYAML: pip install pyyaml")

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "kubernetes"
MANIFESTS = ("jobset.yaml", "trainjob.yaml")
SCHEMAS = "KUBERNETES_SCHEMAS"
"""Folder with the CustomResourceDefinitions of kubernetes-sigs/jobset (config/components/crd/bases)
and kubeflow/trainer (manifests/base/crds)."""
NODES = 2


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def pod_of(name: str) -> dict[str, Any]:
    """The specification of the pods."""
    spec = documents(name)[0]["spec"]
    spec = spec.get("template", {}).get("spec", spec)  # a runtime has a template of a JobSet
    (job,) = spec["replicatedJobs"]
    return job["template"]["spec"]["template"]["spec"]  # type: ignore[no-any-return]


def environment_of(container: dict[str, Any]) -> dict[str, str]:
    """The variables with values that are known before the pod is on a node."""
    return {each["name"]: each["value"] for each in container["env"] if "value" in each}


def as_bytes(text: str) -> int:
    return int(text.removesuffix("Gi")) << 30


# --- what a manifest promises --------------------------------------------------------------------


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_pod_has_the_time_that_the_job_counts_on(name: str) -> None:
    pod = pod_of(name)
    (container,) = pod["containers"]
    environment = environment_of(container)
    granted = float(environment["TIERCKPT_HALT_GRACE_SECONDS"])
    assert granted + 10 <= pod["terminationGracePeriodSeconds"]
    assert granted <= float(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    assert pod["restartPolicy"] == "OnFailure"
    assert int(environment["TIERCKPT_REQUEUE_EXIT_STATUS"]) > 0, "0 means that the training is done"


@pytest.mark.parametrize("name", MANIFESTS)
def test_everything_written_is_on_a_volume(name: str) -> None:
    pod = pod_of(name)
    (container,) = pod["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert pod["securityContext"]["runAsNonRoot"]
    volumes = {each["name"]: each for each in pod["volumes"]}
    mounts = {each["mountPath"]: volumes[each["name"]] for each in container["volumeMounts"]}
    assert len(mounts) == len(volumes)
    config = load_config({}, environment_of(container))
    for path in (config.path, config.shm_dir, config.persistent.path, "/tmp"):
        assert any(Path(path).is_relative_to(mount) for mount in mounts), path
    memory = mounts[config.shm_dir]["emptyDir"]
    assert memory["medium"] == "Memory"
    resources = (
        container.get("resources") or documents(name)[-1]["spec"]["trainer"]["resourcesPerNode"]
    )
    assert as_bytes(memory["sizeLimit"]) < as_bytes(resources["limits"]["memory"])


def test_both_manifests_have_the_same_pods() -> None:
    jobset, trainjob = map(pod_of, MANIFESTS)
    for each in (jobset, trainjob):
        (container,) = each["containers"]
        for own in ("name", "command", "args", "resources"):
            container.pop(own, None)
        container["env"] = [e for e in container["env"] if e["name"] != "JOB_COMPLETION_INDEX"]
    assert jobset == trainjob


# --- the schemas ---------------------------------------------------------------------------------


def strict(schema: Any) -> Any:
    """The schema as an API server with strict validation applies it: unknown fields are errors."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items()}
    if found.pop("x-kubernetes-int-or-string", False):
        found = {"type": ["integer", "string"]}
    open_ended = found.get("x-kubernetes-preserve-unknown-fields")
    if (
        found.get("type") == "object"
        and isinstance(found.get("properties"), dict)
        and not open_ended
    ):
        found.setdefault("additionalProperties", False)
    return found


@pytest.mark.skipif(SCHEMAS not in os.environ, reason=f"needs {SCHEMAS}, a folder of CRDs")
@pytest.mark.parametrize("name", MANIFESTS)
def test_a_cluster_accepts_the_manifests(name: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schemas = {}
    for path in Path(os.environ[SCHEMAS]).glob("*.yaml"):
        crd = yaml.safe_load(path.read_text())["spec"]
        for version in crd["versions"]:
            kind = f"{crd['group']}/{version['name']}", crd["names"]["kind"]
            schemas[kind] = strict(version["schema"]["openAPIV3Schema"])
    for document in documents(name):
        schema = schemas[document["apiVersion"], document["kind"]]
        jsonschema.validate(document, schema)
        document["spec"]["tpyo"] = 1
        with pytest.raises(jsonschema.ValidationError, match="tpyo"):
            jsonschema.validate(document, schema)


# --- run -----------------------------------------------------------------------------------------


def command_of(container: dict[str, Any], index: int, port: int) -> list[str]:
    """The manifest's command for a pod on this machine, with one rank and our training script."""
    changes = {
        "--nproc-per-node": "1",
        "--node-rank": str(index),
        "--master-addr": "127.0.0.1",
        "--master-port": str(port),
    }
    found = [sys.executable, "-m", "torch.distributed.run"]
    for argument in container["args"]:
        name, _, value = argument.partition("=")
        found.append(f"{name}={changes.get(name, value)}" if value else argument)
    return found


@pytest.fixture
def pods(job: RestartJob, shm_dir: Path) -> Iterator[list[Pod]]:
    made = [Pod(f"train-node-0-{n}", shm_dir / f"pod{n}", job.folder) for n in range(NODES)]
    yield made
    for pod in made:
        pod.end()


@pytest.fixture
def job(tmp_path: Path, shm_dir: Path) -> RestartJob:
    return RestartJob(tmp_path, shm_dir)


@on_demand("a minute: each of its six containers imports torch twice")
def test_the_job_continues_after_a_killed_container_and_a_drained_node(
    job: RestartJob, pods: list[Pod]
) -> None:
    """Both pods' containers are started again in place, as by their kubelets."""
    require_pods()
    (container,) = pod_of("jobset.yaml")["containers"]
    port = free_ports(1)[0]

    def start(step_seconds: float) -> None:
        for index, pod in enumerate(pods):
            known = environment_of(container) | {
                "HOME": str(job.folder),
                "TIERCKPT_SHM_DIR": "/dev/shm",
                "TIERCKPT_PATH": str(job.disks / "{node}"),  # two machines' disks
                "TIERCKPT_PERSISTENT_PATH": str(job.folder / "persistent"),
                "TIERCKPT_LOCAL_EVERY_STEPS": "1000",
                "PYTHONDONTWRITEBYTECODE": "1",
            }
            environment = job.environment(**known)
            for name in [n for n in environment if n.startswith("WARM_PYTHON")]:
                del environment[name]
            command = [*command_of(container, index, port), *job.options]
            command += ["--step-seconds", str(step_seconds), "--halted-status", "75"]
            pod.start(command, environment, EXAMPLES, job.folder / "log")

    start(0.05)
    job.wait_for(lambda: job.step() >= 5, "the first steps")
    pods[1].signal(signal.SIGKILL)
    assert [pod.wait(PATIENCE_SECONDS) != 0 for pod in pods] == [True] * NODES
    start(0.05)
    job.wait_for(lambda: len(job.starts()) == 2 and job.step() >= 12, "the second start")
    pods[1].signal(signal.SIGTERM)
    assert [pod.wait(PATIENCE_SECONDS) != 0 for pod in pods] == [True] * NODES
    assert job.kept(NODES, "persistent")
    last = job.step()
    start(0)
    assert [pod.wait(PATIENCE_SECONDS) for pod in pods] == [0] * NODES
    _, second, third = job.starts()
    assert (second["start"] > 5, second["levels"]) == (True, {"memory": NODES})
    assert third["start"] == last + 1
    for rank in range(NODES):
        assert job.newest_life(rank)[-1] == {"done": True}
        assert job.curve(rank)
    job.lost_nothing()
