"""A million queued tasks: time of a submission and of a scheduling pass beside those at 10,000, and memory for each task.

    python -m bench.deep_queue [--tasks 100000] [--full] [--quick] [--json FILE]

One server process on SQLite and simulated agents that hold each lease for half a second, so that passes grant tasks
from the head of the queue all the time. Tasks of ten shapes, of eight consumers. Measured at 10,000 queued tasks and at
each doubling up to the number asked for, in the same process; memory is the server's resident set.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx2
from bench.many_agents import metrics, resident_bytes

from gpool.server.settings import Settings
from gpool.transfer.requests import Address
from tests.tools.processes import PATIENCE_S, Pool
from tests.tools.simulated_agents import Agents, AgentsPlan
from tests.tools.simulated_pool import register

FEW = 10_000
AGENTS, CPUS = 50, 2
HOLD_S = (0.4, 0.6)
CONSUMERS = 8
SHAPES = 10
CHUNK = 5000
GROWS, GROWS_MEMORY = 2.0, 1.1
"""Longest time beside that at 10,000 tasks; memory for a task in the last doubling beside the one before."""
ROUNDS = 60


@dataclass(frozen=True, slots=True)
class Depth:
    """Figures at one length of the queue; times are medians, of passes the mean."""

    queued: int
    submit_one_ms: float
    submit_many_ms: float  # 500 tasks
    pass_ms: float
    planning_ms: float  # a pass, processor time
    granted_per_s: float
    memory_mb: float
    bytes_a_task: float  # of those added since the depth before


def documents(count: int) -> list[dict[str, Any]]:
    """One submission of each shape."""
    return [
        {"command": ["true"], "memory": f"{64 + 16 * shape}MiB", "copies": count}
        for shape in range(SHAPES)
    ]


class Filler:
    def __init__(self, pool: Pool, keys: Sequence[str]) -> None:
        self._keys = keys
        self._http = httpx2.Client(base_url=pool.address, trust_env=False, timeout=PATIENCE_S)
        self._sent = 0

    def close(self) -> None:
        self._http.close()

    def submit(self, count: int) -> float:
        """Submit tasks of the next consumer and shape; return the seconds until they were acknowledged."""
        self._sent += 1
        document = documents(count)[self._sent // len(self._keys) % SHAPES]
        key = self._keys[self._sent % len(self._keys)]
        began = perf_counter()
        headers = {"Authorization": f"Bearer {key}"}
        self._http.post("/v1/tasks", json=document, headers=headers).raise_for_status()
        return perf_counter() - began

    def fill(self, pool: Pool, queued: int) -> None:
        """Submit until so many tasks wait."""
        while (left := queued - metrics(pool)["gpool_tasks_queued"]) > 0:
            for _ in range(max(1, min(20, int(left) // CHUNK))):
                self.submit(min(CHUNK, max(1, int(left))))


def at(pool: Pool, filler: Filler, queued: int, before: Depth | None) -> Depth:
    filler.fill(pool, queued)
    memory = resident_bytes(pool.server.pid)
    first, began = metrics(pool), perf_counter()
    one = [filler.submit(1) for _ in range(ROUNDS)]
    many = [filler.submit(500) for _ in range(max(4, ROUNDS // 12))]
    threading.Event().wait(max(0.0, 5.0 - (perf_counter() - began)))
    last, took = metrics(pool), perf_counter() - began

    def grew(name: str) -> float:
        return last[name] - first[name]

    passes = max(1.0, grew("gpool_scheduling_pass_seconds_count"))
    added = queued - (before.queued if before else 0)
    grown = memory - (before.memory_mb * 1e6 if before else memory)
    return Depth(
        queued,
        round(statistics.median(one) * 1e3, 2),
        round(statistics.median(many) * 1e3, 1),
        round(grew("gpool_scheduling_pass_seconds_sum") / passes * 1e3, 2),
        round(grew("gpool_planning_seconds_total") / passes * 1e3, 3),
        round(grew("gpool_leases_granted_total") / took, 1),
        round(memory / 1e6, 1),
        round(grown / added, 1),
    )


def measure(folder: Path, depths: Sequence[int]) -> list[Depth]:
    with ExitStack() as stack:
        pool = Pool(folder, {"GPOOL_SERVER_TTL_S": "300"})
        stack.callback(pool.stop)
        registered = asyncio.run(register(Settings(data=folder / "data"), AGENTS, CPUS, CONSUMERS))
        pool.start_server()
        crowd = Agents(
            AgentsPlan([Address(pool.address)], registered.nodes, HOLD_S, folder / "agents.log")
        )
        stack.callback(crowd.stop)
        crowd.ready()
        filler = Filler(pool, registered.keys)
        stack.callback(filler.close)
        found: list[Depth] = []
        for queued in depths:
            found.append(at(pool, filler, queued, found[-1] if found else None))
            print(row(found[-1]), flush=True)
        return found


def depths_to(tasks: int) -> list[int]:
    """10,000, its doublings, and the number asked for."""
    found = [FEW]
    while found[-1] * 2 < tasks:
        found.append(found[-1] * 2)
    return [*found, tasks] if tasks > FEW else found


def row(each: Depth) -> str:
    return (
        f"| {each.queued} | {each.submit_one_ms} | {each.submit_many_ms} | {each.pass_ms} | {each.planning_ms} "
        f"| {each.granted_per_s} | {each.memory_mb} | {each.bytes_a_task:g} |"
    )


def short_of(found: Sequence[Depth]) -> list[str]:
    """Medians of the two shallowest depths beside the deepest: one of them alone may be disturbed."""
    said = []
    for name in ("submit_one_ms", "submit_many_ms", "pass_ms"):
        few, many = max(getattr(each, name) for each in found[:2]), getattr(found[-1], name)
        if many > GROWS * few:
            said.append(f"{name} {many:g} at {found[-1].queued}, promised ≤ {GROWS:g} × {few:g}")
    costs = [each.bytes_a_task for each in found[1:]]
    growths = [b / a for a, b in pairwise(costs) if a > 0]
    if growths and costs[-1] > GROWS_MEMORY * max(costs[:-1]):
        said.append(f"memory for a task grows: {costs[-1]:g} bytes after {max(costs[:-1]):g}")
    return said


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--tasks", type=int, help="default 100,000; with --full 1,000,000")
    asked.add_argument("--full", action="store_true", help="1,000,000 tasks")
    asked.add_argument("--quick", action="store_true", help="100,000 tasks (default)")
    asked.add_argument("--json", type=Path)
    options = asked.parse_args()
    tasks = options.tasks or (1_000_000 if options.full and not options.quick else 100_000)
    print(
        f"load {os.getloadavg()[0]:.1f}\n\n| queued | submit one, ms | submit 500, ms | pass, ms | planning CPU, ms "
        "| granted/s | server MB | bytes a task |\n|---|---|---|---|---|---|---|---|",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), depths_to(tasks))
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in found], indent=2) + "\n")
    short = short_of(found)
    for said in short:
        print(f"falls short: {said}")
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
