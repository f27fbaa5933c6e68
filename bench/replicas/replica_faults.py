"""Faults of a replicated pool: replicas killed, stopped, cut off, replaced; the database restarted. Each returns what it measured."""

from __future__ import annotations

import re
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench.replica_ledger import StoreLedger

from tests.tools.processes import PATIENCE_S, eventually
from tests.tools.replica_set import ReplicaSet, wall_clock
from tests.tools.simulated_agents import Agents

KILLED_BAR_S, SILENT_BAR_S = 5.0, 15.0
"""Longest time until another replica leads: after a kill, and after the leader was stopped or cut off."""
DEPOSED = re.compile(r'^gpool_scheduler_decisions_total\{outcome="deposed"\} (\S+)$', re.MULTILINE)
"""Plans and expiries of a replica that were refused by its term."""


@dataclass(frozen=True, slots=True)
class FaultRun:
    """A running pool. `pause_s`: time between two faults. `silent_s`: how long a leader is stopped or cut off."""

    pool: ReplicaSet
    ledger: StoreLedger
    agents: Agents
    count: int
    pause_s: float
    silent_s: float
    times: int = 2  # of kills of the leader, and restarts of the database

    def pause(self) -> None:
        threading.Event().wait(self.pause_s)

    def start(self, number: int) -> float:
        took = self.pool.start(number)
        self.ledger.know(number)
        return took

    def calm(self) -> float:
        """Wait until all agents are connected; return the seconds it took."""
        return eventually(
            "all agents are connected",
            lambda: self.agents.seen().connected == self.count,
            PATIENCE_S,
            every_s=0.2,
        )


@dataclass(slots=True)
class FaultFound:
    """`new_leader_s`: from each fault that hit the leader to the term of another replica. `others`: further figures."""

    bar_s: float | None
    new_leader_s: list[float] = field(default_factory=list)
    reconnected_s: list[float] = field(default_factory=list)
    others: dict[str, float] = field(default_factory=dict)

    def short_of(self) -> list[str]:
        slow = [took for took in self.new_leader_s if self.bar_s is not None and took > self.bar_s]
        return [f"a new leader after {took:.1f} s, promised ≤ {self.bar_s:g} s" for took in slow]


def kill_one(run: FaultRun, number: int, found: FaultFound) -> None:
    """kill -9; if it led, wait for the next leader; start it again."""
    led = run.pool.until_led() == number
    replica, at = run.ledger.replica_of(number), wall_clock()
    run.pool.kill(number)
    if led:
        found.new_leader_s.append(run.ledger.until_term(at, replica))
    found.reconnected_s.append(run.calm())
    run.start(number)
    run.pause()


def kill_each(run: FaultRun) -> FaultFound:
    found = FaultFound(KILLED_BAR_S)
    for number in range(len(run.pool.replicas)):
        kill_one(run, number, found)
    return found


def kill_leader(run: FaultRun) -> FaultFound:
    found = FaultFound(KILLED_BAR_S)
    for _ in range(run.times):
        kill_one(run, run.pool.until_led(), found)
    return found


def restart_database(run: FaultRun) -> FaultFound:
    """Stop PostgreSQL at once, as a crash would, and start it again."""
    found = FaultFound(None)
    for number in range(run.times):
        at = wall_clock()
        found.others[f"without database {number + 1}, s"] = round(
            run.pool.database.restart_at_once(), 2
        )
        found.others[f"leads again {number + 1}, s"] = round(run.ledger.until_term(at, 0), 2)
        run.pause()
        found.reconnected_s.append(run.calm())
    return found


def restart_rolling(run: FaultRun) -> FaultFound:
    """SIGTERM and start of each replica in turn; the next one when the last is ready and all agents are connected."""
    found = FaultFound(KILLED_BAR_S)
    for number in range(len(run.pool.replicas)):
        led = run.pool.until_led() == number
        replica, at = run.ledger.replica_of(number), wall_clock()
        code = run.pool.terminate(number)
        assert code == 128 + signal.SIGTERM, f"a replica ended with code {code} after SIGTERM"
        if led:
            found.new_leader_s.append(run.ledger.until_term(at, replica))
        run.start(number)
        found.reconnected_s.append(run.calm())
        run.pause()
    return found


def freeze_leader(run: FaultRun) -> FaultFound:
    number = run.pool.until_led()
    at = wall_clock()
    run.pool.freeze(number)
    try:
        found = _replaced(run, number, at)
    finally:
        run.pool.thaw(number)
    return _returned(run, number, found)


def cut_off_leader(run: FaultRun) -> FaultFound:
    number = run.pool.until_led()
    at = wall_clock()
    with run.pool.cut_off(number):
        found = _replaced(run, number, at)
    return _returned(run, number, found)


def _replaced(run: FaultRun, number: int, at: float) -> FaultFound:
    """Wait for the next leader, then for the rest of the fault."""
    found = FaultFound(SILENT_BAR_S)
    found.new_leader_s.append(run.ledger.until_term(at, run.ledger.replica_of(number)))
    found.reconnected_s.append(run.calm())
    threading.Event().wait(max(0.0, run.silent_s - (wall_clock() - at)))
    return found


def _returned(run: FaultRun, number: int, found: FaultFound) -> FaultFound:
    """Let the old leader act; count its writes that were refused by its term, and those that were not."""
    replica, at = run.ledger.replica_of(number), wall_clock()
    run.pause()
    found.reconnected_s.append(run.calm())
    page = run.pool.replicas[number].ask("GET", "/metrics").text
    counted = DEPOSED.search(page)
    found.others["writes of the old leader refused"] = float(counted[1]) if counted else 0.0
    found.others["... accepted"] = run.ledger.grants_by(replica, at)
    return found


FAULTS: Mapping[str, Callable[[FaultRun], FaultFound]] = {
    "kill-each": kill_each,
    "kill-leader": kill_leader,
    "database": restart_database,
    "rolling": restart_rolling,
    "freeze": freeze_leader,
    "cut-off": cut_off_leader,
}


def upgrade(run: FaultRun) -> FaultFound:
    """Replace replicas of an older tree by those of this one, in turn, as a rolling restart does."""
    run.pool.tree = None
    return restart_rolling(run)


def older_tree(revision: str, folder: Path) -> Path:
    """Check a revision out of this repository into a new folder."""
    here = Path(__file__).resolve().parents[2]
    archive = subprocess.run(
        ["git", "-C", str(here), "archive", revision, "src"], check=True, capture_output=True
    )
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder
