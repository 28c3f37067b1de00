"""Named points at which a test can make this process die or an operation fail.

Off unless `TIERCKPT_FAULTS` is set, e.g. `kill@seal:version=12,rank=1;enospc@write:version=20`.
An action is `kill` (SIGKILL to oneself), `stop` (SIGSTOP), or an errno's name in lower case. Each
rule fires once in the run of the folder `TIERCKPT_FAULTS_DIR`, where it leaves a file, so that a
test can prove that it fired and a restarted job is not hit again. Conditions compare keyword
arguments of the point; `hit=3` is the third time the other conditions hold in this process.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
from pathlib import Path

from msgspec import Struct

FAULTS_VARIABLE = "TIERCKPT_FAULTS"
FIRED_VARIABLE = "TIERCKPT_FAULTS_DIR"


class Rule(Struct):
    """One parsed rule."""

    text: str
    action: str
    point: str
    conditions: dict[str, str]
    hits: int = 0

    def matches(self, where: dict[str, object]) -> bool:
        """True if all conditions hold; counts how often they do."""
        wanted = {k: v for k, v in self.conditions.items() if k != "hit"}
        if any(str(where.get(k)) != v for k, v in wanted.items()):
            return False
        self.hits += 1
        return self.hits == int(self.conditions.get("hit", self.hits))


def parse(text: str) -> list[Rule]:
    """Rules from the variable's text. Raises ValueError that names the bad rule."""
    rules = []
    for part in filter(None, (p.strip() for p in text.split(";"))):
        action, at, rest = part.partition("@")
        point, _, conditions = rest.partition(":")
        known = action in ("kill", "stop") or hasattr(errno, action.upper())
        pairs = [c.partition("=") for c in conditions.split(",") if c]
        if not at or not point or not known or not all(sign for _, sign, _ in pairs):
            raise ValueError(f"{FAULTS_VARIABLE}: cannot read {part!r}; form: kill@seal:version=3")
        rules.append(Rule(part, action, point, {k: v for k, _, v in pairs}))
    return rules


_rules = parse(os.environ.get(FAULTS_VARIABLE, ""))


def point(name: str, **where: object) -> None:
    """A point where a rule may inject a fault. Raises OSError if a rule says so."""
    if not _rules:
        return
    for rule in _rules:
        if rule.point == name and rule.matches(where) and _claim(rule):
            _fire(rule)


def armed(name: str) -> bool:
    """True if some rule is for this point."""
    return bool(_rules) and any(rule.point == name for rule in _rules)


def _claim(rule: Rule) -> bool:
    """Leave the mark; returns False if the rule fired before."""
    folder = os.environ.get(FIRED_VARIABLE)
    if folder is None:
        return rule.hits == int(rule.conditions.get("hit", 1))
    mark = Path(folder) / "".join(c if c.isalnum() else "_" for c in rule.text)
    try:
        fd = os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return False
    os.write(fd, str(os.getpid()).encode())
    os.close(fd)
    return True


def _fire(rule: Rule) -> None:
    if rule.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif rule.action == "stop":
        # To this thread: a signal to the process would let it run until another thread takes the
        # signal.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    else:
        code = getattr(errno, rule.action.upper())
        raise OSError(code, f"{os.strerror(code)} (injected by {rule.text!r})")
