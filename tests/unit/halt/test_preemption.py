"""Notices of clouds that they take a machine away, asked from real servers on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.metadata_server import HOLDS, TRICKLES, Aws, Azure, Gcp, Server, serving
from tests.support.waiting import until
from tierckpt.config import load_config, parse_notices
from tierckpt.core import NEVER_SECONDS, HaltVote, Reason
from tierckpt.errors import ConfigError
from tierckpt.group import Node
from tierckpt.halt import HaltController, preemption
from tierckpt.halt.preemption import CLOUDS, PreemptionWatcher

Watch = Callable[..., PreemptionWatcher]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = {name: replace(cloud, every_seconds=0.005) for name, cloud in CLOUDS.items()}
    monkeypatch.setattr(preemption, "CLOUDS", quick)


@pytest.fixture
def watch() -> Iterator[Watch]:
    made = []

    def start(setting: str, **environment: str) -> PreemptionWatcher:
        made.append(PreemptionWatcher(setting, environment))
        return made[-1]

    yield start
    for each in made:
        each.close()


def asked_again(server: Server, times: int = 8) -> None:
    before = len(server.asked)
    until(lambda: len(server.asked) >= before + times)


# --- clouds --------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
def test_aws_announces_time_and_action(action: str, watch: Watch) -> None:
    with serving(cloud := Aws()) as server:
        found = watch("aws", AWS_EC2_METADATA_SERVICE_ENDPOINT=server.endpoint + "/")
        asked_again(server)
        assert found.notice is None
        assert server.asked.count("PUT /latest/api/token") == 1
        end = cloud.announce(120, action)
        until(lambda: found.notice)
        assert (found.notice.action, found.notice.end_seconds) == (f"action {action}", end)  # type: ignore[union-attr]
        cloud.notice = None
        until(lambda: found.notice is None)
        found.close()


def test_an_expired_token_is_replaced(watch: Watch) -> None:
    with serving(cloud := Aws()) as server:
        found = watch(f"aws {server.endpoint}")
        asked_again(server)
        cloud.token = "token-2"
        cloud.announce(120)
        until(lambda: found.notice)
        found.close()
    assert not found.problem


def test_google_grants_thirty_seconds(watch: Watch) -> None:
    with serving(cloud := Gcp()) as server:
        found = watch("gcp", GCE_METADATA_HOST=server.endpoint.removeprefix("http://"))
        asked_again(server)
        assert found.notice is None
        assert not found.problem
        cloud.preempted = True
        first = time.time()
        until(lambda: found.notice)
        end = found.notice.end_seconds  # type: ignore[union-attr]
        assert first + 30 <= end <= time.time() + 30
        asked_again(server)
        assert found.notice.end_seconds == end  # type: ignore[union-attr]
        found.close()


def test_azure_announces_events_of_all_machines(watch: Watch) -> None:
    """Only those of this machine count that end it."""
    with serving(cloud := Azure()) as server:
        found = watch(f"azure {server.endpoint}")
        cloud.announce("Preempt", "node_4", time.time() + 30)
        cloud.announce("Freeze", "node_3", time.time() + 30)
        asked_again(server)
        assert found.notice is None
        assert not found.problem
        end = int(time.time() + 40)
        cloud.announce("Terminate", "node_3", end + 500)
        cloud.announce("Preempt", "node_3", end)
        until(lambda: found.notice and found.notice.action == "event Preempt")
        assert found.notice.end_seconds == end  # type: ignore[union-attr]
        found.close()


# --- services that are not well ------------------------------------------------------------------

BAD = {
    "5xx": (503, "busy"),
    "a redirection": (302, ""),
    "a portal's page": (200, "<html>Welcome</html>"),
    "another object": (200, "[1]"),
    "no time": (200, '{"action": "terminate"}'),
    "no date": (200, '{"action": "terminate", "time": "soon"}'),
    "an unknown action": (200, '{"action": "rebalance", "time": "2026-11-26T15:00:00Z"}'),
    "bytes": (200, "\xff\xfe"),
    "a line": (200, "TRUE\nFALSE"),
}


def test_an_answer_that_never_ends_is_given_up(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preemption, "ANSWER_SECONDS", 0.1)
    with serving(lambda *request: (TRICKLES, "")) as server:
        found = watch(f"gcp {server.endpoint}")
        until(lambda: found.problem)
        assert "TimeoutError: the answer does not end" in found.problem
        found.close()


def test_a_wrong_address_in_the_environment_is_a_problem_and_no_error(watch: Watch) -> None:
    found = watch("aws", AWS_EC2_METADATA_SERVICE_ENDPOINT="http://there:port")
    until(lambda: found.problem)
    assert "http://there:port gives no answer" in found.problem
    found.close()


@pytest.mark.parametrize("name", [*BAD, "slow", "away"])
def test_a_bad_answer_is_no_notice_and_asked_for_again(
    name: str, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preemption, "ANSWER_SECONDS", 0.05 if name == "slow" else 5.0)
    aws, status_and_text = Aws(), BAD.get(name, (HOLDS, ""))
    with serving(lambda *request: status_and_text) as server:
        endpoint = "http://127.0.0.1:9" if name == "away" else server.endpoint
        found = watch(f"aws {endpoint}")
        until(lambda: found.problem)
        assert found.notice is None
        assert f"{endpoint} gives no answer that a metadata service of aws gives" in found.problem
        if name != "away":
            aws.announce(100)
            server.reply = aws
            until(lambda: found.notice)
            assert not found.problem
        found.close()


# --- the job -------------------------------------------------------------------------------------


def agreement(ranks: list[Any], version: int) -> HaltVote:
    cast = [rank.halting.wish(version) for rank in ranks]
    return HaltVote(*map(min, zip(*cast, strict=True)))


def test_all_nodes_learn_the_end_of_one(make_rank: Any) -> None:
    with serving(cloud := Aws()) as server:
        long = {
            "halt_seconds_left": 20_000
        }  # an end so far away counts: seconds of a slow machine do not
        ranks = [
            make_rank(nodes=2),
            make_rank(number=1, nodes=2, halt_notices=f"aws {server.endpoint}", **long),
        ]
        asked_again(server)
        agreed = agreement(ranks, 1)
        assert (agreed.reason, agreed.seconds_left) == (Reason.NONE, NEVER_SECONDS)
        cloud.announce(10_000)
        until(lambda: ranks[1].halting._preemption.notice)
        agreed = agreement(ranks, 2)
        for rank in ranks:
            rank.halting.receive(agreed)
            assert rank.halting.reason is Reason.PREEMPTION
            assert rank.halting.reason.is_interruption
            assert 9_000 < rank.halting.seconds_for_others() <= 9_985, "15 s are left to end"
            assert 9_000 < rank.halting.seconds_to_wait() <= 9_985
        assert any(
            "the cloud takes this node away (action terminate) at" in text
            for text in ranks[1].warnings()
        )
        assert "the job ends early: the cloud takes a node away" in ranks[0].said[-1][0]
        ranks[1].halting.close()


@pytest.mark.parametrize("wanted", [0, 700])
def test_an_end_far_ahead_has_time(wanted: float, make_rank: Any) -> None:
    """A machine of Azure may be announced to end in a quarter of an hour."""
    with serving(cloud := Azure()) as server:
        settings = {"halt_notices": f"azure {server.endpoint}", "halt_seconds_left": wanted}
        rank = make_rank(**settings)
        cloud.announce("Reboot", "node_3", time.time() + 600)
        until(lambda: rank.halting._preemption.notice)
        found = rank.halting.wish(1).reason
        assert found is (Reason.PREEMPTION if wanted else Reason.NONE)
        assert any("(event Reboot) at" in text for text in rank.warnings())
        rank.halting.close()


def test_an_absent_service_is_reported_once(make_rank: Any) -> None:
    with serving(lambda *request: (500, "")) as server:
        rank = make_rank(halt_notices=f"aws {server.endpoint}")
        until(lambda: rank.halting._preemption.problem)
        assert [rank.halting.wish(v).reason for v in range(1, 4)] == [Reason.NONE] * 3
        server.reply = lambda *request: (404, "")
        until(lambda: "status 404" in rank.halting._preemption.problem)
        rank.halting.wish(4)
        (said,) = rank.warnings()
        assert f"{server.endpoint} gives no answer" in said
        assert "status 500 for /latest/api/token" in said
        rank.halting.close()


def test_one_process_of_a_node_asks(make_rank: Any, tmp_path: Path) -> None:
    config = load_config({"path": tmp_path, "halt_notices": "aws http://127.0.0.1:9"}, {})
    second = HaltController(config, 1, Node(0, 1, (0, 1)), lambda *said: None, {})
    assert second._preemption._thread is None
    second.close()


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("", ("", "")),
        ("aws", ("aws", "")),
        (" gcp  http://[fd00::254]:80/x ", ("gcp", "http://[fd00::254]:80/x")),
    ],
)
def test_the_setting(text: str, parsed: tuple[str, str]) -> None:
    assert parse_notices(text) == parsed


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("ec2", "valid is one of aws, gcp, azure"),
        ("AWS", "valid is one of aws, gcp, azure"),
        ("aws,gcp", "valid is one of aws, gcp, azure"),
        ("aws ftp://x", "must be like http://127.0.0.1:1338"),
        ("aws http://x y", "must be like http://127.0.0.1:1338"),
        ("aws http://x/?a=b", "must be like http://127.0.0.1:1338"),
        ("aws http://user:key@x", "must be like http://127.0.0.1:1338"),
        ("aws 169.254.169.254", "must be like http://127.0.0.1:1338"),
        ("aws https://x", "must be like http://127.0.0.1:1338"),
        ("aws http://x:y", "must be like http://127.0.0.1:1338"),
    ],
)
def test_a_wrong_setting_is_refused(text: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        load_config({"halt_notices": text}, {})
