"""Three replicas, PostgreSQL and nginx under faults: tasks lost, results accepted twice, false node deaths, time without a leader.

    python -m bench.replicas [--full] [--agents N] [--tasks N] [--faults NAME …] [--upgrade-from REVISION] [--quick] [--json FILE]

Real server processes, a real PostgreSQL and the shipped nginx configuration; the agents are real channels and state
machines in one process, with a timer in place of a sandbox. Each fault hits a pool that is busy: its share of the tasks
is submitted through nginx meanwhile, and the next fault comes when all of them have ended. Agents never die here, so
every lease that ends as lost, and was not given up by its agent, is a false death.

Runs in a network namespace of its own (root), where nftables cuts a leader off. `--json FILE` is written after each
fault; a run with the same sizes and file continues after the last one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from bench.replica_faults import FAULTS, FaultFound, FaultRun, older_tree, upgrade
from bench.replica_ledger import StoreLedger, StoreSeen
from bench.replica_load import Load

from tests.tools.processes import eventually
from tests.tools.replica_set import ReplicaSet, is_isolated, isolated, replica_set
from tests.tools.simulated_agents import (
    Agents,
    AgentsPlan,
    raise_open_files,
)
from tests.tools.simulated_pool import RegisteredPool, register

REPLICAS = 3
CPUS = 2  # of a node
CONSUMERS = 8
DRAINED_WITHIN_S = 900.0
UPGRADE = "upgrade"
SECONDS = {"kill-each": 45, "kill-leader": 35, "database": 35, "rolling": 50, UPGRADE: 50}
"""Time over which the tasks of a fault are submitted; a silent leader's: its silence and 20 s more."""


@dataclass(frozen=True, slots=True)
class Sizes:
    agents: int
    tasks: int  # of all faults together
    silent_s: float
    pause_s: float
    ttl_s: float = 30.0
    beat_s: float = 8.0
    margin_s: float = 5.0
    drain_s: float = 3.0
    replica_timeout_s: float = 8.0
    haste: float = 1.0  # times faster than `SECONDS`
    times: int = 2  # of kills of the leader, and restarts of the database

    def seconds(self, fault: str) -> float:
        return SECONDS.get(fault, self.silent_s + 20.0) / self.haste

    @property
    def settings(self) -> dict[str, str]:
        return {
            "GPOOL_SERVER_TTL_S": f"{self.ttl_s:g}",
            "GPOOL_SERVER_BEAT_S": f"{self.beat_s:g}",
            "GPOOL_SERVER_MARGIN_S": f"{self.margin_s:g}",
            "GPOOL_SERVER_DRAIN_S": f"{self.drain_s:g}",
            "GPOOL_SERVER_REPLICA_TIMEOUT_S": f"{self.replica_timeout_s:g}",
            "GPOOL_SERVER_LOG_LEVEL": "info",
        }


FULL = Sizes(agents=1000, tasks=100_000, silent_s=60.0, pause_s=5.0)
QUICK = Sizes(agents=100, tasks=3000, silent_s=20.0, pause_s=2.0)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One fault. `false_deaths`: leases the pool took from agents that were alive; `given_up`: leases that agents ended
    themselves, because no server confirmed a heartbeat in time."""

    fault: str
    seconds: float
    acknowledged: int
    lost: int
    unasked: int  # tasks in the store beyond those submitted
    twice: int
    false_deaths: int
    given_up: int
    repeated_submissions: int
    slowest_submission_s: float
    longest_silence_s: float  # of the pool towards one agent
    agents_ended: int
    store: StoreSeen
    found: FaultFound

    def short_of(self) -> list[str]:
        checks = (
            (self.lost == 0, f"{self.lost} acknowledged tasks lost"),
            (self.unasked == 0, f"{self.unasked} tasks more than were submitted"),
            (self.twice == 0, f"{self.twice} results accepted twice"),
            (self.store.wrong_sequences == 0, f"{self.store.wrong_sequences} batches misnumbered"),
            (self.false_deaths == 0, f"{self.false_deaths} leases of living agents expired"),
            (self.given_up == 0, f"{self.given_up} leases given up by their agents"),
            (self.agents_ended == 0, f"{self.agents_ended} agents ended by themselves"),
            (self.store.unfenced == 0, f"{self.store.unfenced} grants under another's term"),
            (self.store.unlocked == 0, f"{self.store.unlocked} terms taken without the lock"),
        )
        return [said for holds, said in checks if not holds] + self.found.short_of()


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of the whole run so far; a fault's are those after it less those before."""

    asked: int
    repeated: int
    twice: int
    false_deaths: int
    given_up: int
    store: StoreSeen


class Bench:
    """A running pool with its agents and consumers."""

    def __init__(self, pool: ReplicaSet, sizes: Sizes, registered: RegisteredPool) -> None:
        self.pool, self.sizes = pool, sizes
        self.ledger = StoreLedger(pool)
        self.load = Load(pool.address, pool.context(), registered.keys, per_request=20)
        self.agents: Agents | None = None
        self._nodes = registered.nodes

    def start(self, stack: ExitStack) -> None:
        self.pool.start_all()
        stack.enter_context(self.pool.balanced(8 * self.sizes.agents + 1024))
        for number in range(REPLICAS):
            self.ledger.know(number)
        self.pool.until_led()
        self.ledger.install()
        low, high = self.hold_s
        plan = AgentsPlan(
            [self.pool.pinned], self._nodes, (low, high), self.pool.folder / "agents.log"
        )
        self.agents = Agents(plan)
        stack.callback(self.agents.stop)
        self.agents.ready()

    @property
    def hold_s(self) -> tuple[float, float]:
        """So long that the pool is half busy at the mean rate of submission, and 4 s at most."""
        rate = self.sizes.tasks / (len(FAULTS) * 50.0 / self.sizes.haste)
        mean = min(4.0 / self.sizes.haste, self.sizes.agents * CPUS / (2 * rate))
        return mean / 2, mean * 1.5

    def measure(self, name: str, fault: Callable[[FaultRun], FaultFound], tasks: int) -> Outcome:
        began, load = time.monotonic(), self.load
        before = self._counts()
        load.longest_s = 0.0
        assert self.agents is not None
        self.agents.begin()
        found = asyncio.run(self._under_load(fault, tasks, self.sizes.seconds(name)))
        eventually("all tasks ended", self._is_drained, DRAINED_WITHIN_S, every_s=1.0)
        after, seen = self._counts(), self.agents.seen()
        store = StoreSeen(
            *(b - a for a, b in zip(astuple(before.store), astuple(after.store), strict=True))
        )
        missing = max(0, len(load.acknowledged) - after.store.tasks)
        return Outcome(
            name,
            round(time.monotonic() - began, 1),
            after.asked - before.asked,
            len(load.acknowledged & self.ledger.not_succeeded()) + missing,
            max(0, after.store.tasks - load.asked),
            after.twice - before.twice,
            after.false_deaths - before.false_deaths,
            after.given_up - before.given_up,
            after.repeated - before.repeated,
            round(load.longest_s, 1),
            round(seen.silence_s, 1),
            len(seen.ended),
            store,
            found,
        )

    def _counts(self) -> Counts:
        assert self.agents is not None
        seen, store = self.agents.seen(), self.ledger.seen()
        return Counts(
            self.load.asked,
            self.load.repeated,
            max(len(seen.twice), store.ended_twice),
            len(self.ledger.lost_attempts() - seen.lost),
            seen.expired,
            store,
        )

    def _is_drained(self) -> bool:
        assert self.agents is not None
        assert self.agents.is_running, "the process of the agents ended; its error is above"
        return not self.ledger.unfinished()

    async def _under_load(
        self, fault: Callable[[FaultRun], FaultFound], tasks: int, seconds: float
    ) -> FaultFound:
        assert self.agents is not None
        sizes = self.sizes
        run = FaultRun(
            self.pool,
            self.ledger,
            self.agents,
            sizes.agents,
            sizes.pause_s,
            sizes.silent_s,
            sizes.times,
        )
        async with asyncio.TaskGroup() as group:
            group.create_task(self.load.submit(tasks, tasks / seconds))
            await asyncio.sleep(min(5.0, seconds / 10))
            faulting = group.create_task(asyncio.to_thread(fault, run))
        return faulting.result()


@contextmanager
def running_bench(folder: Path, sizes: Sizes, tree: Path | None = None) -> Iterator[Bench]:
    """A pool of its own beneath the folder, started, with all agents connected. `tree`: source the replicas begin with."""
    folder.mkdir()
    with ExitStack() as stack:
        pool = stack.enter_context(replica_set(folder, REPLICAS, sizes.settings, tree))
        registered = _registered(pool, sizes)
        bench = Bench(pool, sizes, registered)
        bench.start(stack)
        yield bench


def _registered(pool: ReplicaSet, sizes: Sizes) -> RegisteredPool:
    """Registered by the tree that the replicas begin with: it makes the schema."""
    if pool.tree is None:
        return asyncio.run(register(pool.direct(), sizes.agents, CPUS, CONSUMERS))
    code = (
        "import asyncio, pickle, sys; from tests.tools import simulated_pool as s; "
        "from gpool.server.settings import Settings; from pathlib import Path; "
        "settings = Settings(data=Path(sys.argv[1]), database_url=sys.argv[2]); "
        "found = asyncio.run(s.register(settings, int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))); "
        "sys.stdout.buffer.write(pickle.dumps(found))"
    )
    settings = pool.direct()
    words = [sys.executable, "-c", code, str(settings.data), str(settings.store_url)]
    words += [str(sizes.agents), str(CPUS), str(CONSUMERS)]
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{pool.tree / 'src'}:{root}"}
    done = subprocess.run(words, env=environment, cwd=root, check=True, stdout=subprocess.PIPE)
    found: RegisteredPool = pickle.loads(done.stdout)
    return found


# ---- results


HEAD = (
    "| fault | tasks | lost | twice | false deaths | given up | new leader, s | longest silence, s "
    "| submissions repeated | slowest, s | further |\n|---|---|---|---|---|---|---|---|---|---|---|"
)


def row(outcome: Outcome) -> str:
    found = outcome.found
    leader = " · ".join(f"{took:.1f}" for took in found.new_leader_s) or "–"
    further = ", ".join(f"{name} {value:g}" for name, value in found.others.items())
    return (
        f"| {outcome.fault} | {outcome.acknowledged} | {outcome.lost} | {outcome.twice} | {outcome.false_deaths} "
        f"| {outcome.given_up} | {leader} | {outcome.longest_silence_s} | {outcome.repeated_submissions} "
        f"| {outcome.slowest_submission_s} | {further} |"
    )


class Results:
    """The JSON file, with the faults that an earlier run of the same sizes has finished."""

    def __init__(self, path: Path | None, sizes: Sizes, share: int) -> None:
        self._path = path
        self._rows: dict[str, Any] = {"sizes": asdict(sizes) | {"share": share}, "faults": {}}
        if path is not None and path.exists():
            known = json.loads(path.read_text())
            if known.get("sizes") == self._rows["sizes"]:
                self._rows = known

    def done(self, fault: str) -> bool:
        return fault in self._rows["faults"]

    def failures(self) -> list[str]:
        return [
            f"{fault}: {said}"
            for fault, found in self._rows["faults"].items()
            for said in found["short_of"]
        ]

    def add(self, outcome: Outcome) -> None:
        self._rows["faults"][outcome.fault] = asdict(outcome) | {"short_of": outcome.short_of()}
        self._rows["load"] = os.getloadavg()[0]
        if self._path is not None:
            self._path.write_text(json.dumps(self._rows, indent=2) + "\n")


def run_all(options: argparse.Namespace, sizes: Sizes) -> int:
    share = sizes.tasks // (len(options.faults) + bool(options.upgrade_from))
    results = Results(options.json, sizes, share)
    names = [name for name in options.faults if not results.done(name)]
    print(
        f"{REPLICAS} replicas, {sizes.agents} agents, {share} tasks a fault, load {os.getloadavg()[0]:.1f}\n"
    )
    print(HEAD, flush=True)

    def shown(outcome: Outcome) -> None:
        results.add(outcome)
        print(row(outcome), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        if names:
            with running_bench(Path(folder) / "pool", sizes) as bench:
                for name in names:
                    shown(bench.measure(name, FAULTS[name], share))
                    _keep_logs(options.logs, Path(folder) / "pool")
        if options.upgrade_from and not results.done(UPGRADE):
            tree = older_tree(options.upgrade_from, Path(folder) / "older")
            with running_bench(Path(folder) / "upgraded", sizes, tree) as bench:
                shown(bench.measure(UPGRADE, upgrade, share))
                _keep_logs(options.logs, Path(folder) / "upgraded")
    failures = results.failures()
    for said in failures:
        print(f"falls short: {said}")
    print("holds" if not failures else f"{len(failures)} checks failed")
    return 1 if failures else 0


def _keep_logs(target: Path | None, folder: Path) -> None:
    if target is not None:
        target.mkdir(exist_ok=True)
        for log in folder.glob("*.log"):
            (target / log.name).write_bytes(log.read_bytes())


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--agents", type=int, help="default 100, with --full 1,000")
    asked.add_argument(
        "--tasks", type=int, help="of all faults; default 3,000, with --full 100,000"
    )
    asked.add_argument("--silent", type=float, help="seconds a leader is stopped or cut off")
    asked.add_argument("--faults", nargs="*", choices=list(FAULTS), default=list(FAULTS))
    asked.add_argument(
        "--upgrade-from", metavar="REVISION", help="also a rolling upgrade from there"
    )
    asked.add_argument("--full", action="store_true", help="1,000 agents, 100,000 tasks")
    asked.add_argument("--quick", action="store_true", help="the sizes of make bench (default)")
    asked.add_argument("--logs", type=Path, help="folder that keeps the logs of all processes")
    asked.add_argument("--json", type=Path)
    options = asked.parse_args()
    sizes = FULL if options.full and not options.quick else QUICK
    sizes = Sizes(
        options.agents or sizes.agents,
        options.tasks or sizes.tasks,
        options.silent or sizes.silent_s,
        sizes.pause_s,
    )
    if not is_isolated():
        if os.geteuid():
            print("not run: it needs root, for a network namespace of its own")
            return 0
        words = [*isolated(), sys.executable, "-m", "bench.replicas", *sys.argv[1:]]
        os.execvp(words[0], words)
    raise_open_files()
    return run_all(options, sizes)


if __name__ == "__main__":
    sys.exit(main())
