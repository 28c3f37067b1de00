"""Members of a group as processes; member 1 is killed or stopped at a point of its work.

    python -m tests.support.peer_processes <folder> <plan>                        all members
    python -m tests.support.peer_processes <folder> <plan> <number> <address>     one, controlled by
    its input

`plan` is JSON: `lengths` of the shards, the code's `k` and `m`, `join_seconds` and `stall_seconds`
of v1, and `rules`, each a fault of member 1 (see `tierckpt._faults`). For every rule, in a folder
of its number: all members protect v1; then member 1 is replaced, and all protect v2.
`<number>.json` has each member's result for both versions: null, or the error.

Members are forked from one light process, so that many kills need no new interpreters.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, ClassVar, TextIO

from tests.support.peer_shards import QUICK, SECRET, Members
from tierckpt import _faults
from tierckpt.erasure import Code, find_isal
from tierckpt.net import Address
from tierckpt.peer import Limits, Transport

VICTIM = 1
ASK_SECONDS = 4.0
"""Longer than a busy machine keeps a member from answering; a stopped one costs this time."""


class Member:
    """A forked process that executes orders, a line each; the end of its input ends it."""

    ours: ClassVar[set[int]] = set()
    """The parent's ends of all pipes: a copy of one in another child would keep the child alive."""

    def __init__(self, number: int, folder: Path, plan: dict[str, Any], rule: str | None) -> None:
        orders, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            for fd in (*Member.ours, self._orders, self._answers):
                os.close(fd)
            if rule is not None:
                os.environ[_faults.FIRED_VARIABLE] = str(folder)
                _faults._rules = _faults.parse(rule)
            with open(orders) as told, open(answers, "w", buffering=1) as said:
                serve(number, "127.0.0.1", folder, plan, told, said)
            os._exit(0)
        os.close(orders)
        os.close(answers)
        Member.ours |= {self._orders, self._answers}
        self._said = open(self._answers)  # noqa: SIM115
        self.address = json.loads(self._said.readline())

    def tell(self, version: int, addresses: list[list[Any]]) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._orders, f"{json.dumps([version, addresses])}\n".encode())

    def answer(self) -> str | None:
        """The result: null, or the error; "killed" when the process ended."""
        line = self._said.readline()
        return json.loads(line) if line else "killed"

    def end(self) -> None:
        Member.ours -= {self._orders, self._answers}
        os.close(self._orders)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)
        os.waitpid(self.pid, 0)
        self._said.close()


def serve(
    number: int, host: str, folder: Path, plan: dict[str, Any], told: TextIO, said: TextIO
) -> None:
    """Run a member: print its address, then protect each ordered version and print the result."""
    limits = Limits(plan["join_seconds"], plan["stall_seconds"], ask_seconds=ASK_SECONDS)
    code = Code(len(plan["lengths"]), plan["k"], plan["m"])
    with Transport(SECRET, host) as transport:
        print(json.dumps([host, transport.address.port]), file=said, flush=True)
        while order := told.readline():
            version, addresses = json.loads(order)
            transport.limits = limits if version == 1 else QUICK
            members = Members(folder, code, plan["lengths"])
            members.transports = [transport] * code.n
            members.addresses = tuple(Address(*address) for address in addresses)
            error = None
            try:
                members.exchange(number, version).run()
            except Exception as caught:
                error = f"{type(caught).__name__}: {caught}"
            print(json.dumps(error), file=said, flush=True)


def scenario(folder: Path, plan: dict[str, Any], rule: str) -> dict[str, list[str | None]]:
    """Run one rule, with two versions."""
    folder.mkdir()
    numbers = range(len(plan["lengths"]))
    members = [Member(i, folder, plan, rule if i == VICTIM else None) for i in numbers]
    fared: dict[str, list[str | None]] = {}
    for version in (1, 2):
        addresses = [member.address for member in members]
        for member in members:
            member.tell(version, addresses)
        hit_last = sorted(numbers, key=lambda i: i == VICTIM)
        answers: dict[int, str | None] = {}
        for i in hit_last:
            stopped = rule.startswith("stop") and i == VICTIM and version == 1
            answers[i] = "stopped" if stopped else members[i].answer()
        fared[f"v{version}"] = [answers[i] for i in numbers]
        if version == 1:
            fared["ports"] = [str(port) for _, port in addresses]
            with contextlib.suppress(ProcessLookupError):
                os.kill(members[VICTIM].pid, signal.SIGKILL)
            members[VICTIM].end()
            members[VICTIM] = Member(VICTIM, folder, plan, None)
    for member in members:
        member.end()
    return fared


def main() -> None:
    folder, plan = Path(sys.argv[1]), json.loads(sys.argv[2])
    if len(sys.argv) > 3:
        serve(int(sys.argv[3]), sys.argv[4], folder, plan, sys.stdin, sys.stdout)
        return
    find_isal()  # all imports happen once, not in every child
    for number, rule in enumerate(plan["rules"]):
        fared = scenario(folder / str(number), plan, rule)
        (folder / f"{number}.json").write_text(json.dumps(fared))


if __name__ == "__main__":
    main()
