"""A process's place, and the way to the other shims, from the launcher's environment."""

from __future__ import annotations

import pytest

from tierckpt.run import Meeting, Place, meeting_of, place_of
from tierckpt.run.meeting import enter, needs_own

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "29500",
}
HOROVODRUN = {
    "HOROVOD_RANK": "1",
    "HOROVOD_SIZE": "2",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "4000",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "123",
}
SRUN = {
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, Place("none", 0, 1, True, "")),
        # The batch script of Slurm, which is no task of a step.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, Place("none", 0, 1, True, "")),
        (TORCHRUN, Place("torchrun", 3, 8, False, "")),
        ({**SRUN, **TORCHRUN}, Place("torchrun", 3, 8, False, "SLURM_JOB_ID.7.0")),
        (HOROVODRUN, Place("horovodrun", 1, 2, False, "")),
        (MPIRUN, Place("mpirun", 1, 2, True, "PMIX_NAMESPACE.123")),
        (SRUN, Place("srun", 0, 2, True, "SLURM_JOB_ID.7.0")),
    ],
)
def test_the_innermost_launcher_gives_the_place(environment: dict[str, str], place: Place) -> None:
    assert place_of(environment) == place


@pytest.mark.parametrize(
    ("environment", "rendezvous", "kind", "host", "port"),
    [
        (TORCHRUN, "", "port", "a", 29500),
        ({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}, "", "store", "a", 29500),
        ({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"}, "", "port", "a", 29500),
        (HOROVODRUN, "", "kv", "10.0.0.1", 4000),
        ({**HOROVODRUN, "MASTER_ADDR": "b", "MASTER_PORT": "1"}, "", "kv", "10.0.0.1", 4000),
        (MPIRUN, "", "name", "", 0),
        ({**MPIRUN, "MASTER_ADDR": "b", "MASTER_PORT": "9"}, "", "port", "b", 9),
        (SRUN, "", "name", "", 0),
        (SRUN, "[::1]:77", "port", "::1", 77),
    ],
)
def test_shims_meet(
    environment: dict[str, str],
    rendezvous: str,
    kind: str,
    host: str,
    port: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.environ", environment)
    found = meeting_of(place_of(environment), rendezvous)
    assert isinstance(found, Meeting)
    assert (found.kind, found.host, found.port) == (kind, host, port)


@pytest.mark.parametrize(
    "environment",
    [
        {**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
        {**SRUN, "SLURM_STEP_NUM_NODES": "2"},
        {k: v for k, v in MPIRUN.items() if k != "PMIX_NAMESPACE"},
    ],
)
def test_several_nodes_need_an_address(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.environ", environment)
    assert meeting_of(place_of(environment), "") is None


def test_two_launches_have_different_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.environ", MPIRUN)
    other = {**MPIRUN, "PMIX_NAMESPACE": "124"}
    assert meeting_of(place_of(MPIRUN), "") != meeting_of(place_of(other), "")


def test_the_first_attempt_has_the_launchers_environment() -> None:
    environment = {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    enter(1, {}, environment)
    assert environment.pop("TIERCKPT_ATTEMPT") == "1"
    assert environment == {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}


def test_after_the_launchers_own_restart_the_first_attempt_meets_elsewhere() -> None:
    """Its processes would share the keys of dead ones."""
    environment = {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert not needs_own(environment)
    environment["TORCHELASTIC_RESTART_COUNT"] = "1"
    assert needs_own(environment)
    enter(1, {"MASTER_PORT": "5"}, environment)
    assert environment["MASTER_PORT"] == "5"
    assert environment["TORCHELASTIC_RESTART_COUNT"] == "1"


def test_later_attempts_meet_elsewhere_and_are_counted() -> None:
    environment = {
        **TORCHRUN,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "2",
    }
    enter(3, {"MASTER_PORT": "5"}, environment)
    assert environment["MASTER_PORT"] == "5"
    assert environment["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    assert environment["TORCHELASTIC_RESTART_COUNT"] == "4"
    assert environment["TIERCKPT_ATTEMPT"] == "3"
