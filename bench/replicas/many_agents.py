"""Thousands of agents on one server: memory of the server for each, heartbeats received, request times, false deaths.

    python -m bench.many_agents [--agents 1000] [--seconds 60] [--full] [--quick] [--json FILE]

One server process on SQLite; the agents are real channels and state machines in one other process, heartbeats every
10 s. Meanwhile consumers submit a few tasks a second and ask for tasks, the queue and the nodes; their times are the
figures. Memory counts from a server without nodes, so that all the server keeps of a node is included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import quantiles
from time import perf_counter

import httpx2

from gpool.server.settings import Settings
from gpool.transfer.requests import Address
from tests.tools.processes import Pool
from tests.tools.simulated_agents import Agents, AgentsPlan, raise_open_files
from tests.tools.simulated_pool import register

BEAT_S = 10.0
SETTINGS = {
    "GPOOL_SERVER_BEAT_S": f"{BEAT_S:g}",
    "GPOOL_SERVER_TTL_S": "30",
    "GPOOL_SERVER_MARGIN_S": "5",
}
KILOBYTES, P99_MS = 60.0, 250.0
HEARTBEATS = 0.9
"""Least part of the heartbeats that are due."""
HOLD_S = (1.0, 5.0)
TASKS_PER_S, REQUESTS_PER_S = 20.0, 40.0
CONSUMERS = 4
PATHS = ("/v1/tasks/{task}", "/v1/me", "/v1/queue?limit=50", "/v1/resources", "/v1/nodes?limit=50")


@dataclass(frozen=True, slots=True)
class Figures:
    agents: int
    seconds: float
    kilobytes_an_agent: float
    kilobytes_a_known_node: float  # of these: kept while it is not connected
    heartbeats_per_s: float
    heartbeats_due: float  # part of those due that came
    p50_ms: float
    p99_ms: float
    requests: int
    failed_requests: int
    server_cores: float
    tasks: int
    false_deaths: int
    given_up: int
    reconnections: int
    load: float

    def short_of(self) -> list[str]:
        checks = (
            (self.kilobytes_an_agent <= KILOBYTES, f"{self.kilobytes_an_agent:.1f} kB an agent, promised ≤ {KILOBYTES:g}"),
            (self.p99_ms <= P99_MS, f"p99 {self.p99_ms:.0f} ms, promised ≤ {P99_MS:g}"),
            (self.heartbeats_due >= HEARTBEATS, f"{self.heartbeats_due:.0%} of the heartbeats came"),
            (self.failed_requests == 0, f"{self.failed_requests} requests failed"),
            (self.false_deaths == 0, f"{self.false_deaths} nodes lost their leases"),
            (self.given_up == 0, f"{self.given_up} leases given up by their agents"),
            (self.reconnections == 0, f"{self.reconnections} agents connected again"),
        )  # fmt: skip
        return [said for holds, said in checks if not holds]


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def metrics(pool: Pool) -> dict[str, float]:
    page = pool.ask("GET", "/metrics").text
    lines = (line.rpartition(" ") for line in page.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def empty_bytes(folder: Path) -> int:
    """Memory of a server that knows no node, on a store that exists: migrations import further modules."""
    folder.mkdir()
    asyncio.run(register(Settings(data=folder / "data"), 0, 0, 0))
    pool = Pool(folder, SETTINGS)
    try:
        pool.start_server()
        for path in PATHS[1:]:
            pool.ask("GET", path)  # what is imported late is imported now
        pool.submit("true")
        threading.Event().wait(2.0)
        return resident_bytes(pool.server.pid)
    finally:
        pool.stop()


class Requests:
    """Consumers at an even rate. `times_ms`: of every request that was answered."""

    def __init__(self, address: str, keys: Sequence[str]) -> None:
        self._address, self._keys = address, keys
        self.times_ms: list[float] = []
        self.failed = self.tasks = 0
        self._task = ""

    async def run(self, seconds: float) -> None:
        limits = httpx2.Limits(max_connections=64)
        async with (
            httpx2.AsyncClient(
                base_url=self._address, trust_env=False, timeout=30, limits=limits
            ) as client,
            asyncio.TaskGroup() as group,
        ):
            loop = asyncio.get_running_loop()
            ends, number = loop.time() + seconds, 0
            due = loop.time()
            submits = round(REQUESTS_PER_S / TASKS_PER_S)
            while loop.time() < ends:
                await asyncio.sleep(max(0.0, due - loop.time()))
                due += 1 / REQUESTS_PER_S
                number += 1
                if number % submits == 0 or not self._task:
                    group.create_task(self._ask(client, number, "POST", "/v1/tasks"))
                else:
                    path = PATHS[number % len(PATHS)].format(task=self._task)
                    group.create_task(self._ask(client, number, "GET", path))

    async def _ask(self, client: httpx2.AsyncClient, number: int, method: str, path: str) -> None:
        headers = {"Authorization": f"Bearer {self._keys[number % len(self._keys)]}"}
        if path.startswith("/v1/tasks/"):
            headers = {"Authorization": f"Bearer {self._keys[0]}"}
        if method == "POST":
            headers = {"Authorization": f"Bearer {self._keys[0]}"}
        began = perf_counter()
        try:
            document = {"command": ["true"]} if method == "POST" else None
            answer = await client.request(method, path, json=document, headers=headers)
            answer.raise_for_status()
        except httpx2.HTTPError as error:
            self.failed += 1
            print(f"{method} {path}: {error}", file=sys.stderr)
            return
        self.times_ms.append((perf_counter() - began) * 1e3)
        if method == "POST":
            self.tasks += 1
            self._task = answer.json()["ids"][0]


def measure(folder: Path, agents: int, seconds: float) -> Figures:
    base = empty_bytes(folder / "empty")
    with ExitStack() as stack:
        place = folder / "pool"
        place.mkdir()
        pool = Pool(place, SETTINGS)
        stack.callback(pool.stop)
        registered = asyncio.run(register(Settings(data=place / "data"), agents, 2, CONSUMERS))
        pool.start_server()
        threading.Event().wait(2.0)
        known = resident_bytes(pool.server.pid)
        plan = AgentsPlan([Address(pool.address)], registered.nodes, HOLD_S, place / "agents.log")
        crowd = Agents(plan)
        stack.callback(crowd.stop)
        crowd.ready()
        threading.Event().wait(BEAT_S)  # each has sent a heartbeat
        before, cpu, began = metrics(pool), pool.server.cpu_s(), perf_counter()
        requests = Requests(pool.address, registered.keys)
        asyncio.run(requests.run(seconds))
        after, took = metrics(pool), perf_counter() - began
        used = pool.server.cpu_s() - cpu
        full = resident_bytes(pool.server.pid)
        seen = crowd.seen()
    beats = 'gpool_agent_frames_total{kind="Beat"}'
    came = after[beats] - before[beats]
    cuts = quantiles(requests.times_ms, n=100)
    return Figures(
        agents,
        round(took, 1),
        round((full - base) / agents / 1e3, 1),
        round((known - base) / agents / 1e3, 1),
        round(came / took, 1),
        round(came / (agents * (took - BEAT_S) / BEAT_S), 3),  # all may beat at one moment
        round(cuts[49], 1),
        round(cuts[98], 1),
        len(requests.times_ms),
        requests.failed,
        round(used / took, 2),
        requests.tasks,
        round(after["gpool_nodes_lost_total"]) + agents - seen.connected,
        seen.expired,
        seen.connections - agents,
        round(os.getloadavg()[0], 1),
    )


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--agents", type=int, help="default 1,000; with --full 10,000")
    asked.add_argument("--seconds", type=float, help="default 60; with --full 600")
    asked.add_argument("--full", action="store_true", help="10,000 agents for ten minutes")
    asked.add_argument("--quick", action="store_true", help="1,000 agents for a minute (default)")
    asked.add_argument("--json", type=Path)
    options = asked.parse_args()
    is_full = options.full and not options.quick
    raise_open_files()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(
            Path(folder),
            options.agents or (10_000 if is_full else 1000),
            options.seconds or (600.0 if is_full else 60.0),
        )
    print(f"{found.agents} agents on one server for {found.seconds:g} s (load {found.load})\n")
    print("| | measured | promised |\n|---|---|---|")
    print(f"| server memory, kB an agent | {found.kilobytes_an_agent} | ≤ {KILOBYTES:g} |")
    print(f"| of these for a node that is not connected, kB | {found.kilobytes_a_known_node} | |")
    print(f"| heartbeats/s (part of those due) | {found.heartbeats_per_s} ({found.heartbeats_due:.0%}) | ≥ {HEARTBEATS:.0%} |")  # fmt: skip
    print(f"| requests, p50 and p99 in ms | {found.p50_ms}, {found.p99_ms} | p99 ≤ {P99_MS:g} |")
    print(f"| requests, failed | {found.requests}, {found.failed_requests} | 0 |")
    print(f"| false deaths, leases given up | {found.false_deaths}, {found.given_up} | 0, 0 |")
    print(f"| agents that connected again | {found.reconnections} | 0 |")
    print(f"| server, cores | {found.server_cores} | |")
    if options.json:
        options.json.write_text(json.dumps(asdict(found), indent=2) + "\n")
    short = found.short_of()
    for said in short:
        print(f"falls short: {said}")
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
