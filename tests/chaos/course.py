"""The course of one round: runs, the faults in them, and the conditions that hold after each.

Every fault, recovery and finding is reported, with its number, to the owner of the log.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.chaos.cluster import Cluster
from tests.chaos.damage import Damage
from tests.chaos.job import JOURNAL, Orders
from tests.chaos.journals import Journals, Line
from tests.chaos.plan import MAX_RANKS, RANKS, STEPS, Fault, Life, Round
from tests.chaos.truth import Truth
from tests.support.crash.launcher import Process

PATIENCE_SECONDS = 100.0
"""A run without any progress for this time is stuck."""
LINGER_SECONDS = 10
AGENT_SECONDS = 90.0
"""The time an agent may take to finish its work after it has lingered."""
KEEP_LAST = 2
JOURNAL_STEPS = 6
ROUNDS_STEPS = (2, 50, 5)
"""Steps in which runs take turns to check all of their replicas."""
OF_TRAINERS = ("kill_script", "kill_barrier", "kill_copy", "kill_seal", "kill_call")
"""Prefixes of the marks that rules of trainers leave, and rules of agents do not."""
REFUSAL = "this job had complete checkpoints"
"""The refusal of a restart that finds no complete version any more."""
UNSEEN = "nothing to restore was found, and some locations could not be read"
"""The same where it cannot tell, because a seal was damaged."""

States = list[dict[int, dict[str, str]]]
"""Digests of all state that a next step depends on, by rank and version."""
Losses = list[dict[int, str]]
"""Losses by rank and step."""


class FindingError(Exception):
    """A broken promise; it ends the round."""


class Watch:
    """Waits for a run, and reports when it is over or stuck."""

    def __init__(
        self, cluster: Cluster, journals: Journals, life: int, listen: Callable[[], None]
    ) -> None:
        """`listen` reads new lines of `journals`."""
        self._cluster, self._journals, self._life = cluster, journals, life
        self._listen = listen
        self._seen, self._since = 0, time.monotonic()

    def over(self) -> bool:
        """True when an unfinished rank ended, or all ranks are done."""
        ended = [r for r, p in enumerate(self._cluster.ranks) if p.exitcode is not None]
        self._listen()
        done = [r for r in ended if self._journals.of(r, self._life, "done")]
        return len(done) < len(ended) or len(done) == len(self._cluster.ranks)

    def rest(self) -> None:
        """Wait a moment. Raises FindingError when the run made no progress for long."""
        lines = sum(map(len, self._journals.lines))
        if lines != self._seen:
            self._seen, self._since = lines, time.monotonic()
        elif time.monotonic() - self._since > PATIENCE_SECONDS:
            for process in self._cluster.ranks:
                Process(process.pid).signal(signal.SIGUSR1)  # dumps its stacks to its log
            time.sleep(1)
            raise FindingError(f"stuck; the stacks are in {self._cluster.folder}/life*.log")
        time.sleep(0.005)


class Course:
    """One round; `run` it once."""

    def __init__(
        self,
        plan: Round,
        cluster: Cluster,
        states: States,
        losses: Losses,
        log: Callable[..., None],
    ) -> None:
        """`states` and `losses` are those of an undisturbed job."""
        self._plan, self._cluster, self._log = plan, cluster, log
        self._states, self._losses = states, losses
        self._journals = Journals(cluster.folder, MAX_RANKS)
        self._truth = Truth(plan.shape, KEEP_LAST)
        self.life = self.number = self.recoveries = 0
        """The number of the current run, of faults so far, and of runs that recovered from one."""

    def run(self) -> None:
        """Play all runs. Raises FindingError."""
        for number, life in enumerate(self._plan.lives, 1):
            self.life = number
            self._cluster.expire_lease()
            promised = self._truth.promised()
            self._log(life=number, owed=self._truth.owed())
            self._truth.placed(number, life.nodes)
            self._start(life)
            if not self._live(life, promised):
                self._log(life=self.life, ended="a restart from version 1 may round differently")
                return
            if not promised and self._refused():
                self._log(life=self.life, ended="refused to begin afresh, rightly: nothing is owed")
                return
            self._check_losses()
            if life.end is None:
                self._check_end()
                return
            self._check_that_it_was_killed(life.end)
            self._die(life.end)
            for fault in life.after:
                self._strike(fault)

    # --- a run --------------------------------------------------------------------------------

    def _start(self, life: Life) -> None:
        settings = {
            "path": self._cluster.path,
            "shm_dir": str(self._cluster.shm),
            "persistent_path": str(self._cluster.shared) if self._plan.shape.persistent else "",
            "local_every_steps": 2,
            "persistent_every_steps": 4,
            "local_every_seconds": 0,
            "persistent_every_seconds": 0,
            "local_keep": KEEP_LAST,
            "persistent_keep": KEEP_LAST,
            # Another number of ranks may be too few, or too many on one node, for the scheme.
            "peer_redundancy": self._plan.shape.scheme if life.ranks == RANKS else "none",
            "peer_interface": "lo",
            "slots": self._plan.shape.slots,
            "agent_linger_seconds": LINGER_SECONDS,
            "replicas": f"warn every {ROUNDS_STEPS[self.life % len(ROUNDS_STEPS)]}",
        }
        if self._cluster.launcher.endswith(JOURNAL):
            # 0: a killed job leaves the last version on local, and a journal.
            memory = self.life % 2
            settings |= {"local_every_steps": 0, "memory_every_steps": memory}
            settings["local_journal_steps"] = JOURNAL_STEPS
        orders = []
        for rank, node in enumerate(life.nodes):
            rules: list[tuple[str, int]] = []
            loading = ""
            if life.end is not None and life.end.rank == rank:
                loading = life.end.place if life.end.kind == "loading" else ""
                if not loading:
                    rules.append((f"kill@{life.end.place}", life.end.at))
                # If that version is not taken, or nothing is loaded, it dies a little later.
                rules.append(("kill@script:phase=begin,step={}", life.end.at + 2))
            orders.append(
                Orders(
                    folder=str(self._cluster.folder),
                    life=self.life,
                    rank=rank,
                    ranks=life.ranks,
                    steps=STEPS,
                    launcher=self._cluster.launcher,
                    settings={**settings, "node": f"node{node}"},
                    gates=tuple(fault.at for fault in life.during),
                    dies_loading_at=loading,
                    rules=tuple(rules),
                    agent_rule=life.agent_rule if node == life.agent_rule_node else "",
                    node=node,
                )
            )
        self._cluster.start(orders)

    def _live(self, life: Life, promised: int) -> bool:
        """Wait for its end; False when it cannot be compared with the reference from here on."""
        began = False
        gates = sorted({fault.at for fault in life.during})
        watch = Watch(self._cluster, self._journals, self.life, self._listen)
        while not watch.over():
            if not began and (starts := self._starts()):
                began = True
                self._check_recovery(starts, promised)
                if starts[0]["version"] == 1 and self._cluster.launcher == "ddp":
                    return False
            if gates and self._stand_at(gates[0]):
                for fault in (f for f in life.during if f.at == gates[0]):
                    self._strike(fault)
                (self._cluster.folder / f"gate-{self.life}-{gates.pop(0)}").touch()
            if life.end is None and self._closing():
                self._cluster.expire_lease()  # its last flush would wait for a dead run's
            watch.rest()
        if not began and (starts := self._starts()):
            self._check_recovery(starts, promised)
        return True

    def _listen(self) -> None:
        for rank, line in self._journals.read():
            if "event" in line:
                if line["event"] == "drifted":
                    raise FindingError(f"rank {rank} said of equal ranks: {line['message']}")
                what = (line["event"], line["level"], line["version"], line["message"])
                self._truth.heard(line["life"], rank, *what)

    def _starts(self) -> list[Line]:
        """The restore report of every rank; empty until all ranks have one."""
        ranks = range(len(self._cluster.ranks))
        found = [self._journals.of(rank, self.life, "start") for rank in ranks]
        return [lines[0] for lines in found] if all(found) else []

    def _stand_at(self, gate: int) -> bool:
        found = [self._journals.of(rank, self.life, "waiting") for rank in range(RANKS)]
        return all(any(line["waiting"] == gate for line in lines) for lines in found)

    def _closing(self) -> bool:
        """True when some rank has made its last step."""
        return any(
            line["step"] == STEPS - 1
            for rank in range(RANKS)
            for line in self._journals.of(rank, self.life, "loss")
        )

    # --- faults --------------------------------------------------------------------------------

    def _die(self, end: Fault) -> None:
        """Apply the fault that ends the run; the launcher kills the other trainers."""
        self._cluster.stop()
        self._listen()
        nodes = end.nodes
        if end.kind in ("power", "allocation"):
            nodes = self._plan.shape.node_numbers
        for node in nodes:
            self._cluster.kill_agents(node)
            self._cluster.wipe_memory(node)
            self._truth.lost("memory", node)
            if end.kind in ("node", "nodes", "allocation"):
                self._cluster.wipe_disk(node)
                self._truth.lost("local", node)
        self._tell(end)

    def _strike(self, fault: Fault) -> None:
        """Apply a fault that does not end the run."""
        hit: Any = None
        self._listen()
        for node in fault.nodes:
            if fault.kind == "agent":
                hit = self._cluster.kill_agents(node)
            elif fault.kind in ("stop", "wake"):
                number = signal.SIGSTOP if fault.kind == "stop" else signal.SIGCONT
                hit = self._cluster.signal_agents(node, number)
            else:
                getattr(self._cluster, fault.kind)(node)
        if fault.kind in ("flip", "truncate"):
            hit = Damage(self._cluster).strike(fault)
            for each in hit:
                self._truth.damaged(*each)
        self._tell(fault, hit)

    def _tell(self, fault: Fault, hit: Any = None) -> None:
        self.number += 1
        said = {key: value for key, value in asdict(fault).items() if value}
        self._log(fault=self.number, life=self.life, **said, hit=hit)

    # --- conditions that must hold -------------------------------------------------------------

    def _check_recovery(self, starts: list[Line], promised: int) -> None:
        """Check that all ranks restored one version, no older than promised, bit for bit."""
        first = starts[0]
        version = first["version"]
        self.recoveries += self.life > 1
        keys = ("version", "generation", "levels", "rejected")
        self._log(life=self.life, promised=promised, **{key: first[key] for key in keys})
        if len({(x["version"], x["generation"], x["start"]) for x in starts}) > 1:
            raise FindingError(f"ranks came back to different versions: {starts}")
        self._truth.began(self.life, first["own_generation"], (first["generation"], version))
        for rank, line in enumerate(starts):
            expected = self._expected(rank, version, len(starts))
            wrong = [name for name in expected if expected[name] != line["digests"].get(name)]
            if wrong:
                raise FindingError(f"v{version} came back to rank {rank} with wrong {wrong}")
        if version < promised:
            raise FindingError(
                f"came back to v{version} from {first['levels']}, v{promised} was promised; "
                f"rejected: {first['rejected']}"
            )

    def _expected(self, rank: int, version: int, ranks: int) -> dict[str, str]:
        """Digests by name. Per-rank state is not defined on a new rank, and objects that the script
        gave under `extra_per_rank` are restored only to the same number of ranks."""
        if ranks == RANKS:
            return self._states[rank][version]
        first, *others = (states[version] for states in self._states)
        if rank < RANKS:
            return {k: v for k, v in self._states[rank][version].items() if k != "stream"}
        return {k: v for k, v in first.items() if all(other[k] == v for other in others)}

    def _check_losses(self) -> None:
        """Check that this run trained exactly as the reference."""
        for rank in range(RANKS):
            for line in self._journals.of(rank, self.life, "loss"):
                if self._losses[rank][line["step"]] != line["loss"]:
                    raise FindingError(f"rank {rank}, step {line['step']}: another loss")

    def _check_that_it_was_killed(self, end: Fault) -> None:
        """Check that the planned fault ended the run, and nothing else."""
        marks = Path(self._cluster.folder) / f"marks-{self.life}-r{end.rank}"
        if any(mark.name.startswith(OF_TRAINERS) for mark in marks.glob("*")):
            return
        raise FindingError(self._ends())

    def _check_end(self) -> None:
        """Check that the job ended in the right state, and left nothing in memory."""
        for rank in range(RANKS):
            found = self._journals.of(rank, self.life, "done")
            if not found:
                raise FindingError(self._ends())
            if found[0]["done"] != self._states[rank][STEPS]:
                raise FindingError(f"rank {rank} ended in another state than the reference")
        # An agent stopped in an exchange waits for nodes that forgot it before it gives up.
        deadline = time.monotonic() + LINGER_SECONDS + AGENT_SECONDS
        while agents := self._cluster.agents():
            for agent in agents:
                agent.forget()
            if time.monotonic() > deadline:
                raise FindingError(f"{len(agents)} agents outlived the job and their linger")
            time.sleep(0.01)
        if left := self._cluster.left_in_memory():
            raise FindingError(f"left in shared memory: {left}")

    def _refused(self) -> bool:
        """True if the restart was refused: a version was complete once, and none is now. A refusal
        of a fresh start is right then, and so is every further one for the same reason.
        """
        said = [log.read_text(errors="replace") for log in self._logs()]
        return not self._starts() and any(r in text for text in said for r in (REFUSAL, UNSEEN))

    def _logs(self) -> list[Path]:
        return sorted(self._cluster.folder.glob(f"life{self.life}-r*.log"))

    def _ends(self) -> str:
        """The reason, from the logs, why a run ended that should not have."""
        statuses = [process.exitcode for process in self._cluster.ranks]
        tails = [f"--- {p.name}\n{p.read_text(errors='replace')[-1500:]}" for p in self._logs()]
        return f"the run ended by itself, with {statuses}\n" + "\n".join(tails)
